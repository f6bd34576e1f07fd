"""Documents of the word tasks; scores come from the package."""

from typing import Any

from rope_patch.harness.tasks import Documents, retrieval_documents

__all__ = ["common", "frequent"]


def common(**options: Any) -> Documents:
    """A list of words, the most common ones asked for."""
    return retrieval_documents("cwe", **options)


def frequent(**options: Any) -> Documents:
    """A coded text, its most frequent words asked for."""
    return retrieval_documents("fwe", **options)
