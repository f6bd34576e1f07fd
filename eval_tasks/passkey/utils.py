"""Documents of the passkey tasks; scores come from the package."""

from typing import Any

from rope_patch.harness.tasks import Documents, exact_match, retrieval_documents

__all__ = ["exact_match", "passkey"]


def passkey(**options: Any) -> Documents:
    """One key per prompt."""
    return retrieval_documents("passkey", **options)
