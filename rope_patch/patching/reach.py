"""The length that a sequence will reach: stated by who knows it, and what a cache was filled under."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache

Reach = int | Sequence[int] | Tensor
"""The length that a sequence will reach, or one of each row of a batch [tokens]."""


class Stated(NamedTuple):
    """What is stated of the sequences that a model reads.

    Attributes:
        rotary: the model's rotary module.
        tokens: the lengths that the sequences will reach: (rows,), or (1,) for all rows [tokens].
        slack: how far a pass may read beyond these lengths tokens that no other token sees or that are dropped again:
            padding on the right, speculated tokens [tokens].
        generating: ``generate`` alone handles the cache; its beams change places only within their prompt.
    """

    rotary: nn.Module
    tokens: Tensor
    slack: float
    generating: bool


_STATED: ContextVar[tuple[Stated, ...]] = ContextVar("rope_patch_reach", default=())
_MARK = "rope_patch_read_under"


@contextlib.contextmanager
def reaching(rotary: nn.Module, tokens: Reach, *, slack: float = 0, generating: bool = False) -> Iterator[None]:
    """State the length that sequences of one model will reach, for its forward passes in a ``with`` block.

    The block belongs to the thread: a generator that yields inside it leaves the length stated until it goes on.

    Args:
        rotary: the model's rotary module; one of a single table takes no notice.
        tokens: one number for all rows, or one for each [tokens].
        slack: as of :class:`Stated`; ``math.inf`` for rows that are padded on the right [tokens].
        generating: as of :class:`Stated`.

    Raises:
        ValueError: no whole numbers above 0, or several axes of them.

    Example:
        >>> rotary = nn.Identity()
        >>> with reaching(rotary, [100, 12000]):
        ...     stated_of(rotary).tokens
        tensor([  100, 12000])
    """
    entry = Stated(rotary, _lengths(tokens), slack, generating)
    _STATED.set((*_STATED.get(), entry))
    try:
        yield
    finally:  # its own entry: blocks of generators end in any order
        _STATED.set(tuple(other for other in _STATED.get() if other is not entry))


def _lengths(tokens: Reach) -> Tensor:
    try:
        stated = tokens if isinstance(tokens, Tensor) else torch.as_tensor(tokens, device="cpu")
        whole = not (stated.is_floating_point() or stated.is_complex() or stated.dtype == torch.bool)
        if not whole or stated.ndim > 1 or not stated.numel() or int(stated.min()) < 1:
            raise ValueError
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(f"reaching takes a number of tokens >= 1, or one for each row, got {tokens!r}") from None
    return stated.reshape(-1)


def stated_of(rotary: nn.Module) -> Stated | None:
    """Return what was stated last of a model's sequences, by its rotary module; None where nothing was."""
    return next((entry for entry in reversed(_STATED.get()) if entry.rotary is rotary), None)


def cached_tokens(cache: Any) -> int:
    """Return how many tokens a cache holds; 0 for none."""
    return int(cache.get_seq_length()) if isinstance(cache, Cache) else 0


class ReadUnder(NamedTuple):
    """What the rows of a cache were read under.

    Attributes:
        long: which rows under the long table: (rows,) bool.
        stated: the lengths that were stated then; None where none were [tokens].
        keys: of the first layer then: operations on the rows of a cache put others in their place.
        tables: that were chosen from, and where they change: the fingerprint of a rotary module.
    """

    long: Tensor
    stated: Tensor | None
    keys: Tensor | None
    tables: str


def mark(cache: Cache, long: Tensor, stated: Stated | None, tables: str) -> None:
    """Note in a cache which of its rows were read under the long one of two tables: (rows,) bool."""
    setattr(cache, _MARK, ReadUnder(long, None if stated is None else stated.tokens, _keys(cache), tables))


def mark_of(cache: Any, tables: str) -> ReadUnder | None:
    """Return which of two tables the tokens in a cache were read under; None where that is not known.

    It is not known of a cache that was filled under other tables. Where rows of different tables may have been put in
    another order since, it is not known any more.
    """
    noted: ReadUnder | None = getattr(cache, _MARK, None)
    if noted is None or noted.tables != tables:
        return None
    if noted.keys is not None and noted.keys is _keys(cache):
        return noted
    uniform = bool((noted.long == noted.long[0]).all())
    return noted._replace(long=noted.long[:1]) if uniform else None


def _keys(cache: Cache) -> Tensor | None:
    keys = getattr(cache.layers[0], "keys", None) if cache.layers else None
    return keys if isinstance(keys, Tensor) else None


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


PADDED = math.inf
"""The slack of rows that are padded on the right."""
