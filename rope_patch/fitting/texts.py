"""The texts of a fit: the one that rows are drawn from, the one that is held out, and the second domain."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from rope_patch.evaluation.builtin_text import Corpus, builtin_kind
from rope_patch.evaluation.documents import Source, TokenDocument, documents, spread_windows

VALIDATION_SHARE = 0.1
"""Share of the text, at its end, that is held out, so that the table is chosen on it."""
MOST_CHARACTERS = 64_000_000
"""The most characters of a text that are used."""


def split_text(data: Source | None) -> tuple[str, str]:
    """Return the text to which a table is fitted, and the held-out text.

    Args:
        data: the text of the fit; by default the code of Python's standard library.
    """
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
    are no windows if the table is fitted to the whole built-in text, of which the documentation is a part, or if the
    documentation is too short.

    Args:
        tokenizer: the tokenizer of the model.
        data: the text of the fit.
        length: length of a window [tokens].
        windows: number of windows; if there are not as many, all that there are.
    """
    # The second attempt asks for as many windows as the text has.
    for count in () if isinstance(data, Corpus) else (windows, None):
        with contextlib.suppress(ValueError):
            return spread_windows(tokenizer, builtin_kind("reference"), length, count)[0]
    return []
