"""Documents of the variable tracking tasks; scores come from the package."""

from typing import Any

from rope_patch.harness.tasks import Documents, recall, retrieval_documents

__all__ = ["chain", "recall"]


def chain(**options: Any) -> Documents:
    """One chain of assignments, all of its variables asked for."""
    return retrieval_documents("vt", **options)
