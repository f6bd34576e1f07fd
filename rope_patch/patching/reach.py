"""The length that a sequence will reach: stated by who knows it, and what a cache was filled under."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

Reach = int | Sequence[int] | Tensor
"""The length that a sequence will reach, or one of each row of a batch [tokens]."""


class Stated(NamedTuple):
    """What is stated of the sequences that are read.

    Attributes:
        tokens: the lengths that they will reach: (rows,), or (1,) for all rows [tokens].
        padded: whether rows may go on behind their length with padding, which no other token sees.
    """

    tokens: Tensor
    padded: bool


_STATED: ContextVar[Stated | None] = ContextVar("rope_patch_reach", default=None)
_MARK = "rope_patch_read_under"


class ReadUnder(NamedTuple):
    """What the rows of a cache were read under.

    Attributes:
        long: which rows under the long table: (rows,) bool.
        stated: the lengths that were stated then; None where none were.
    """

    long: Tensor
    stated: Stated | None


@contextlib.contextmanager
def reaching(tokens: Reach, *, padded: bool = False) -> Iterator[None]:
    """State the length that sequences will reach, for all forward passes in a ``with`` block.

    A model of two tables chooses by it; others take no notice.

    Args:
        tokens: one number for all rows, or one for each [tokens].
        padded: rows may go on behind their length with padding on the right, which no other token sees. Otherwise a
            token behind it raises where the table would be another.

    Raises:
        ValueError: no whole numbers above 0, or several axes of them.

    Example:
        >>> with reaching([100, 12000]):
        ...     stated_reach().tokens
        tensor([  100, 12000])
    """
    stated = torch.as_tensor(tokens)
    whole = not (stated.is_floating_point() or stated.is_complex() or stated.dtype == torch.bool)
    if not whole or stated.ndim > 1 or not stated.numel() or int(stated.min()) < 1:
        raise ValueError(f"reaching takes a number of tokens >= 1, or one for each row, got {tokens!r}")
    token = _STATED.set(Stated(stated.reshape(-1), padded))
    try:
        yield
    finally:
        _STATED.reset(token)


def stated_reach() -> Stated | None:
    """Return the lengths that are stated; None where none are."""
    return _STATED.get()


def cached_tokens(cache: Any) -> int:
    """Return how many tokens a cache holds; 0 for none."""
    return int(cache.get_seq_length()) if isinstance(cache, Cache) else 0


def mark(cache: Cache, long: Tensor) -> None:
    """Note in a cache which of its rows were read under the long table: (rows,) bool."""
    setattr(cache, _MARK, ReadUnder(long, _STATED.get()))


def mark_of(cache: Any) -> ReadUnder | None:
    """Return what the tokens in a cache were read under; None where nobody noted it, or it is empty."""
    noted = getattr(cache, _MARK, None)
    return noted if noted is not None and cached_tokens(cache) else None


def by_row(values: Tensor, rows: int, what: str) -> Tensor:
    """Return one value for each row; those of fewer prompts are repeated as ``generate`` repeats prompts.

    Raises:
        ValueError: rows that are no multiple of the values.

    >>> by_row(torch.tensor([1, 2]), 4, "lengths are stated").tolist()
    [1, 1, 2, 2]
    """
    if len(values) in (1, rows):
        return values
    if rows % len(values):
        raise ValueError(f"{len(values)} {what}, and the model is called with {rows} rows")
    return values.repeat_interleave(rows // len(values))
