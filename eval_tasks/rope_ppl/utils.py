"""Documents of the strided perplexity tasks; scores come from the package."""

from typing import Any

from rope_patch.harness.tasks import Documents, perplexity_documents, strided_perplexity

__all__ = ["strided", "strided_perplexity"]


def strided(**options: Any) -> Documents:
    """Windows of a text, each scored on its last tokens."""
    return perplexity_documents(**options)
