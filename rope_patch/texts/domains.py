"""Texts to analyse a model on: the user's own, or the short texts of five kinds that ship with the package."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rope_patch.runtime.packaged import data_path
from rope_patch.texts.documents import Source, cut_windows, encode, prefix_ids, whole_text

DOMAINS = ("english", "italian", "chinese", "python", "arithmetic")
LONGEST_ROW = 2048
"""Greatest length of a row, unless the user asks for longer ones [tokens]."""


@dataclass(frozen=True, eq=False)
class TextRows:
    """Rows of equal length, with the same number of rows from each group.

    Attributes:
        ids: (rows, tokens) int64, the token ids of each row, which begins with the special tokens.
        groups: (rows,) name of the text that each row is from.
        name: name of all the texts together, for results.
        sha256: digest of the texts.
    """

    ids: Tensor
    groups: tuple[str, ...]
    name: str
    sha256: str


def builtin_domains() -> dict[str, str]:
    """Return the texts that ship with the package, by name: prose in three languages, code, arithmetic."""
    folder = data_path("assets") / "domains"
    return {name: (folder / f"{name}.txt").read_text(encoding="utf-8") for name in DOMAINS}


def read_rows(
    tokenizer: Any,
    sources: Mapping[str, Source] | None = None,
    *,
    window: int | None = None,
    tokens: int = 16384,
    context: int = LONGEST_ROW,
) -> TextRows:
    """Cut texts into rows of equal length: the same number from each text, spread evenly over it.

    Args:
        tokenizer: the tokenizer of the model that will read the rows.
        sources: texts by name, as :func:`~rope_patch.texts.documents.documents` reads them; by default
            :func:`builtin_domains`.
        window: length of a row [tokens]; by default the model's context, but at most ``LONGEST_ROW`` and the length of
            the shortest text.
        tokens: largest number of tokens in all rows together; at least one row of each text is read in any case.
        context: context length of the model [tokens].

    Raises:
        ValueError: there is no text, the window is below 2 tokens, a text is shorter than one row, or as for
            ``documents``.
        FileNotFoundError: as for ``documents``.
    """
    named: Mapping[str, Source]
    if sources is None:
        named = builtin_domains()
        label = "built-in domains"
    else:
        named = dict(sources)
        label = ", ".join(named)
    if not named:
        raise ValueError("give at least one text")
    prefix = prefix_ids(tokenizer)
    digest = hashlib.sha256()
    streams = {}
    for name, source in named.items():
        whole = whole_text(source)
        # The zero byte marks where a text ends: otherwise the same characters, divided otherwise among the texts, would
        # have the same digest.
        digest.update(whole.encode("utf-8", "surrogatepass") + b"\0")
        (streams[name],) = encode(tokenizer, whole, prefix=())
    shortest = min(streams, key=lambda name: len(streams[name].ids))
    room = len(streams[shortest].ids) + len(prefix)
    size = min(context, LONGEST_ROW, room) if window is None else window
    if size < len(prefix) + 2:
        raise ValueError(
            f"rows need at least 2 tokens beside the special ones, got {size} in all: give a longer window or text"
        )
    if size > room:
        raise ValueError(f"{shortest!r} holds {room} tokens, less than one row of {size}: take shorter rows")
    inner = size - len(prefix)
    # The shortest text decides, so that every text has the same weight.
    count = max(1, min((room - len(prefix)) // inner, tokens // (size * len(streams))))
    rows = [(name, row.ids) for name, stream in streams.items() for row in cut_windows(stream, prefix, inner, count)]
    groups, ids = zip(*rows, strict=True)
    return TextRows(torch.stack(ids), groups, label, digest.hexdigest())
