"""Rows to train on: documents packed without losing a token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from rope_patch.evaluation.documents import TokenDocument

Boundaries = Literal["join", "apart", "whole"]
BOUNDARIES = ("join", "apart", "whole")


def pack(documents: Iterable[TokenDocument], length: int, boundaries: Boundaries = "join") -> Iterator[dict[str, Any]]:
    """Yield rows of at most ``length`` tokens that hold every token of the documents exactly once, in order.

    Args:
        documents: as :func:`~rope_patch.evaluation.documents.encode` yields them, with their special tokens.
        length: of a row [tokens].
        boundaries: ``"join"``: a stream cut into rows, documents see those before them in their row; ``"apart"``: the
            same rows, with ``starts`` that say where documents begin, for
            :class:`~rope_patch.training.collators.PackedCollator`; ``"whole"``: each row holds one document or a piece
            of one.

    Yields:
        ``ids``, ``index`` (number of the row), and ``starts`` of the documents within the row.

    Raises:
        ValueError: a length below 2, or unknown boundaries.
    """
    if length < 2:
        raise ValueError(f"a row needs at least 2 tokens to learn one, got length={length}")
    if boundaries not in BOUNDARIES:
        raise ValueError(f"boundaries must be one of {', '.join(BOUNDARIES)}, got {boundaries!r}")
    ids: list[int] = []
    starts: list[int] = []
    index = 0
    for document in documents:
        rest = document.ids.tolist()
        if rest:
            starts.append(len(ids))
        while rest:
            room = length - len(ids)
            ids, rest = ids + rest[:room], rest[room:]
            if len(ids) == length or (boundaries == "whole" and not rest):
                yield {"ids": ids, "index": index, "starts": starts}
                # What is left of a document goes on in the next row, where it is a start of its own.
                ids, starts, index = [], [0] if rest else [], index + 1
    if ids:
        yield {"ids": ids, "index": index, "starts": starts}
