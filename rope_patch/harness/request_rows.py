"""Log-likelihood requests as rows of tokens: those that begin one another are read once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RequestRow:
    """Requests that begin one another: the longest is read, and with it all of them.

    Attributes:
        ids: (tokens,) int64, the tokens that are read: all but the last one of the longest request.
        asked: the number of each request, with the number of tokens of its context and the tokens of its continuation.
    """

    ids: Tensor
    asked: list[tuple[int, int, Sequence[int]]]

    def targets(self) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return the states and the tokens that they score, each pair once and in order, and each request's pairs."""
        pairs = [
            torch.stack([torch.arange(context - 1, context - 1 + len(rest)), torch.tensor(rest)], 1)
            for _, context, rest in self.asked
        ]
        unique, where = torch.unique(torch.cat(pairs), dim=0, return_inverse=True)
        return unique[:, 0].contiguous(), unique[:, 1], where.split([len(rest) for _, _, rest in self.asked])


def group_requests(
    requests: Sequence[tuple[Any, list[int], list[int]]], table_of: Callable[[int], int]
) -> list[RequestRow]:
    """Return requests in rows, the longest first.

    Args:
        requests: the requests: each one's texts or None, the tokens of its context, and those of its continuation.
        table_of: gives for a number of tokens a number that stands for the table under which a text of that length is
            read; only requests that are read under the same table share a row.
    """
    texts = []
    for i, (_, context, continuation) in enumerate(requests):
        if not context or not continuation:
            raise ValueError(f"request {i} has {len(context)} tokens of context and {len(continuation)} to score")
        # Big-endian bytes sort as the numbers do, so that texts which begin alike become neighbours.
        ids = numpy.array([*context, *continuation[:-1]], dtype=">i4").tobytes()
        texts.append((table_of(len(context) + len(continuation)), ids, i))
    rows: list[tuple[int, bytes, list[int]]] = []
    # In reverse order a text follows the longer ones that begin with it.
    for table, ids, i in sorted(texts, reverse=True):
        if not rows or rows[-1][0] != table or not rows[-1][1].startswith(ids):
            rows.append((table, ids, []))
        rows[-1][2].append(i)
    rows.sort(key=lambda row: (-len(row[1]), row[1]))
    return [
        RequestRow(
            torch.from_numpy(numpy.frombuffer(ids, dtype=">i4").astype(numpy.int64)),
            [(i, len(requests[i][1]), requests[i][2]) for i in sorted(numbers)],
        )
        for _, ids, numbers in rows
    ]
