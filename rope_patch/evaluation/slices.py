"""The tokens of a long text, encoded a slice at a time: those of a single call, in a fraction of its memory.

A tokenizer holds some 200 bytes for each character of a text until its call returns. Here a call sees a slice only, and
what remains of it are two arrays of integers.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

Integers = NDArray[numpy.int64]

SLICE = 2**17
"""Length of a slice; where neighbours cannot be joined, slices are 16 times as long, and then it is one call
[characters]."""
OVERLAPS = (2**11, 2**14, 2**16)
"""What two slices share, tried in turn [characters]."""
EDGE = 512
"""What is left aside at each end of an overlap, where one of the two slices begins or ends [characters]."""
AGREEMENT = 512
"""The stretch of an overlap over which both slices must have the same tokens to be joined in it [characters]."""


class TokenArrays:
    """Tokens of a text, as they are added slice by slice.

    Attributes:
        ids: of the tokens, 8 bytes each.
        ends: the UTF-8 byte of the text at which each token ends, 8 bytes each; None when the tokenizer does not tell.
    """

    def __init__(self, ids: Iterable[int], ends: bool) -> None:
        self.ids = array("q", ids)
        self.ends = array("q", [0] * len(self.ids)) if ends else None

    def add(self, piece: _Slice, first: int, stop: int | None) -> None:
        """Add the tokens ``first:stop`` of a slice."""
        assert self.ends is not None
        self.ids.frombytes(piece.ids[first:stop].tobytes())
        # Of tokens that share a character the first counts its bytes.
        ends = numpy.maximum.accumulate(piece.ends[first:stop])
        self.ends.frombytes(numpy.maximum(ends, self.ends[-1] if self.ends else 0).tobytes())


@dataclass(frozen=True)
class _Slice:
    """The tokens of the characters ``begin:stop`` of a text, the characters that each covers, and where it ends."""

    begin: int
    stop: int
    ids: Integers
    starts: Integers
    stops: Integers
    ends: Integers


def token_arrays(tokenizer: Any, text: str, prefix: Sequence[int] = (), limit: int | None = None) -> TokenArrays:
    """Return the tokens of a text behind some special ones.

    Two slices are joined where both have the same tokens, at the same characters, over ``AGREEMENT`` characters. Such a
    join is exact for byte-pair encodings, in which two encodings that share a token can be joined at it (corollary III
    in the README of ``crates/bpe`` of github.com/github/rust-gems), and for tokenizers that split a text at words
    first; for a unigram model over unsplit text the agreement is all that is known. Where no such stretch is found,
    longer slices are tried, and in the end the text is encoded in one call.

    Args:
        tokenizer: of the model. One that is not "fast" does not tell the characters of its tokens: it gets one call.
        text: to encode.
        prefix: ids to put in front.
        limit: tokens that suffice: the slices behind them are not read. By default all are [tokens].

    Returns:
        The tokens; with a limit at least so many of them where the text has them.
    """
    if not getattr(tokenizer, "is_fast", False):
        # Too long for the model is what windows are for: verbose=False keeps the tokenizer's warning away.
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return TokenArrays(itertools.chain(prefix, ids), ends=False)
    for size in (SLICE, 16 * SLICE):
        if size < len(text):
            tokens = TokenArrays(prefix, ends=True)
            if _add_slices(tokens, tokenizer, text, size, limit):
                return tokens
    tokens = TokenArrays(prefix, ends=True)
    tokens.add(_read(tokenizer, text, 0, len(text), 0), 0, None)
    return tokens


def _add_slices(tokens: TokenArrays, tokenizer: Any, text: str, size: int, limit: int | None) -> bool:
    """Add the tokens of slices of a size; False where two of them cannot be joined."""
    left, first, before = _read(tokenizer, text, 0, size, 0), 0, 0
    while left.stop < len(text) and (limit is None or len(tokens.ids) < limit):
        for overlap in OVERLAPS:
            begin = left.stop - overlap
            upto = before + len(text[left.begin : begin].encode("utf-8", "surrogatepass"))
            right = _read(tokenizer, text, begin, min(begin + size, len(text)), upto)
            place = _meeting(left, right, first)
            if place is not None:
                break
        else:
            return False
        tokens.add(left, first, place[0])
        left, first, before = right, place[1], upto
    tokens.add(left, first, None)
    return True


def _read(tokenizer: Any, text: str, begin: int, stop: int, before: int) -> _Slice:
    """Encode a slice of a text, with so many bytes before it."""
    part = text[begin:stop]
    coded = tokenizer(part, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
    ids = numpy.array(coded["input_ids"], dtype=numpy.int64)
    offsets = numpy.array(coded["offset_mapping"], dtype=numpy.int64).reshape(-1, 2)
    points = numpy.frombuffer(part.encode("utf-32-le", "surrogatepass"), dtype=numpy.uint32)
    size = 1 + (points > 0x7F).astype(numpy.int64) + (points > 0x7FF) + (points > 0xFFFF)
    upto = numpy.concatenate([[before], before + size.cumsum()])
    return _Slice(begin, stop, ids, begin + offsets[:, 0], begin + offsets[:, 1], upto[offsets[:, 1]])


def _meeting(left: _Slice, right: _Slice, first: int) -> tuple[int, int] | None:
    """Return the token of each of two slices at which they can be joined; None where there is none.

    Args:
        left: the slice whose end the other begins in.
        right: the other one.
        first: token of the left one at which it was joined itself, which must not be passed.
    """
    if any((piece.starts[1:] < piece.starts[:-1]).any() for piece in (left, right)):
        return None  # offsets that do not rise cannot be aligned
    low, high = right.begin + EDGE, left.stop - EDGE
    for begin in range(low, high - AGREEMENT + 1, AGREEMENT):
        a, b = (numpy.searchsorted(one.starts, (begin, begin + AGREEMENT)) for one in (left, right))
        parts = [(one.ids[i:j], one.starts[i:j], one.stops[i:j]) for one, (i, j) in ((left, a), (right, b))]
        if a[1] - a[0] >= 2 and a[0] >= first and all(map(numpy.array_equal, *parts)):
            middle = int(a[1] - a[0]) // 2
            return int(a[0]) + middle, int(b[0]) + middle
    return None
