"""Texts to analyse a model on: the user's own, or short ones of five kinds that ship with the package."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rope_patch.evaluation.documents import Source, documents, encode, prefix_ids, spread_starts
from rope_patch.packaged import data_path

DOMAINS = ("english", "italian", "chinese", "python", "arithmetic")
LONGEST_ROW = 2048
"""Rows are no longer unless asked for [tokens]."""


@dataclass(frozen=True, eq=False)
class TextRows:
    """Rows of equal length, as many of each group.

    Attributes:
        ids: (rows, tokens) int64, each with the special tokens in front.
        groups: (rows) what each is of.
        name: of the text.
        sha256: of the text.
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
    """Cut texts into rows of equal length, spread evenly over each and as many from each.

    Args:
        tokenizer: of the model.
        sources: texts by name, as :func:`~rope_patch.evaluation.documents.documents` reads them; by default
            :func:`builtin_domains`.
        window: length of a row [tokens]; by default the context, ``LONGEST_ROW`` or what the shortest text has, if
            less.
        tokens: of all rows together, at most; at least one row of each source is read.
        context: of the model [tokens].

    Raises:
        ValueError: no source, a window below 2 tokens, a text shorter than one row, and as ``documents``.
        FileNotFoundError: as ``documents``.
    """
    named = builtin_domains() if sources is None else dict(sources)
    if not named:
        raise ValueError("give at least one text")
    prefix = prefix_ids(tokenizer)
    digest = hashlib.sha256()
    streams: dict[str, Tensor] = {}
    for name, source in named.items():
        whole = "\n\n".join(document.text for document in documents(source))
        digest.update(whole.encode("utf-8", "surrogatepass") + b"\0")
        (stream,) = encode(tokenizer, whole, prefix=())
        streams[name] = stream.ids
    shortest = min(streams, key=lambda name: len(streams[name]))
    room = len(streams[shortest]) + len(prefix)
    size = min(context, LONGEST_ROW, room) if window is None else window
    if size < len(prefix) + 2:
        cause = f"is {shortest!r} too short?" if window is None else "take a longer window"
        raise ValueError(f"rows need at least 2 tokens beside the special ones, got {size} in all: {cause}")
    if size > room:
        raise ValueError(f"{shortest!r} holds {room} tokens, less than one row of {size}: take shorter rows")
    inner = size - len(prefix)
    count = max(1, min(len(streams[shortest]) // inner, tokens // (size * len(streams))))
    rows, groups = [], []
    for name, ids in streams.items():
        for start in spread_starts(len(ids), inner, count):
            rows.append(torch.cat((torch.tensor(prefix, dtype=torch.long), ids[start : start + inner])))
            groups.append(name)
    label = "built-in domains" if sources is None else ", ".join(named)
    return TextRows(torch.stack(rows), tuple(groups), label, digest.hexdigest())
