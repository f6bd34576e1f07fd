"""Documents of the LongPPL tasks; scores come from the package."""

from typing import Any

from rope_patch.harness.longppl import key_token_documents, long_perplexity, of_all
from rope_patch.harness.tasks import Documents

__all__ = ["long_perplexity", "of_all", "windows_with_key_tokens"]


def windows_with_key_tokens(**options: Any) -> Documents:
    """Windows of a text with their key tokens."""
    return key_token_documents(**options)
