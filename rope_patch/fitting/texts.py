"""The text of a fit: what rows are drawn from, what is held out, and the second domain."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from rope_patch.evaluation.documents import Source, TokenDocument, documents, spread_windows
from rope_patch.evaluation.text import Corpus, builtin_kind

VALIDATION_SHARE = 0.1
"""Share of the text, at its end, that is held out: the table is chosen on it."""
MOST_CHARACTERS = 64_000_000
"""The most characters of a text that are used."""


def split_text(data: Source | None) -> tuple[str, str]:
    """Return the text to fit to and the held-out text; without data, of the code of Python's standard library."""
    source = builtin_kind("source") if data is None else data
    whole = source.text if isinstance(source, Corpus) else "\n\n".join(document.text for document in documents(source))
    whole = whole[:MOST_CHARACTERS]
    cut = round(len(whole) * (1 - VALIDATION_SHARE))
    return whole[:cut], whole[cut:]


def second_domain(
    tokenizer: PreTrainedTokenizerBase, data: Source | None, length: int, windows: int | None
) -> Sequence[TokenDocument]:
    """Return windows of the second domain, the reference documentation of Python.

    A table that fits one kind of text better can be worse on another kind, so the choice looks at a second one. There
    are no windows where the fit was made on the whole built-in text, or where the documentation is too short.

    Args:
        tokenizer: of the model.
        data: that the fit is made on.
        length: of a window [tokens].
        windows: how many are asked for; as many as there is room for where these are too many.
    """
    for count in () if isinstance(data, Corpus) else (windows, None):
        with contextlib.suppress(ValueError):
            return spread_windows(tokenizer, builtin_kind("reference"), length, count)[0]
    return []
