"""Documents of the passage retrieval tasks; scores come from the package."""

from typing import Any

from rope_patch.harness.tasks import Documents, retrieval_documents

__all__ = ["passages"]


def passages(**options: Any) -> Documents:
    """Numbered passages of the haystack, the number of one asked for."""
    return retrieval_documents("passage_retrieval", **options)
