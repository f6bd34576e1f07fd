"""Losses of windows of text, summed by document and by position: the result of :func:`perplexity`."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rope_patch.texts.documents import TokenDocument


def _exp(nll: float) -> float:
    # math.exp raises OverflowError for larger losses.
    return math.exp(nll) if nll < 700 else math.inf


@dataclass(frozen=True)
class Bucket:
    """Mean loss of the tokens at positions ``start <= position < stop`` of their window.

    Attributes:
        start: first position [tokens]; the token at position 0 is never predicted.
        stop: position after the last one [tokens].
        tokens: number of tokens that were scored.
        nll: mean negative log-likelihood [nats/token]; nan if none was.
    """

    start: int
    stop: int
    tokens: int
    nll: float

    @property
    def perplexity(self) -> float:
        """``exp(nll)``."""
        return _exp(self.nll)


@dataclass(frozen=True)
class DocumentScore:
    """Loss of one document, or of one window where a single document was scored.

    Attributes:
        name: name of the document; of a window ``name[start:stop]``, with its positions [tokens].
        tokens: number of scored tokens in each bucket.
        nll: sum of the negative log-likelihoods in each bucket [nats].
        total_tokens: number of all scored tokens, in a bucket or not.
        total_nll: sum of the negative log-likelihoods of all scored tokens [nats].
        bytes: number of UTF-8 bytes of the scored tokens; None if the tokens came without their text.
    """

    name: str
    tokens: tuple[int, ...]
    nll: tuple[float, ...]
    total_tokens: int
    total_nll: float
    bytes: int | None

    def __add__(self, other: DocumentScore) -> DocumentScore:
        """Return the score of both together, under the name of the first; without the bytes of one there are none."""
        size = None
        if self.bytes is not None and other.bytes is not None:
            size = self.bytes + other.bytes
        return DocumentScore(
            self.name,
            tuple(map(operator.add, self.tokens, other.tokens)),
            tuple(map(operator.add, self.nll, other.nll)),
            self.total_tokens + other.total_tokens,
            self.total_nll + other.total_nll,
            size,
        )


@dataclass(frozen=True)
class PerplexityResult:
    """Perplexity over documents, whole and by position.

    Attributes:
        nll: mean negative log-likelihood over all scored tokens [nats/token].
        tokens: number of scored tokens.
        bits_per_byte: loss per byte of text [bits/byte], which can be compared between vocabularies; None if the tokens
            came without their text.
        windows: number of windows read, each with a context of its own.
        window: length of the windows [tokens].
        stride: distance between the starts of consecutive windows of a document [tokens]; smaller by the special tokens
            where it would be the window.
        chunk: length of a forward pass [tokens].
        buckets: mean loss at each range of positions.
        documents: loss of each document, or of each window if there is a single document.
        key_tokens: the same of the key tokens alone; None if none were marked.
    """

    nll: float
    tokens: int
    bits_per_byte: float | None
    windows: int
    window: int
    stride: int
    chunk: int
    buckets: tuple[Bucket, ...]
    documents: tuple[DocumentScore, ...]
    key_tokens: PerplexityResult | None = None

    @property
    def perplexity(self) -> float:
        """``exp(nll)``."""
        return _exp(self.nll)

    def inside(self, start: int, stop: int) -> list[int]:
        """Return the indices of the buckets that cover positions ``start`` to ``stop``.

        Raises:
            ValueError: ``start`` or ``stop`` is not an edge of a bucket.
        """
        inside = [i for i, b in enumerate(self.buckets) if start <= b.start and b.stop <= stop]
        if not inside or self.buckets[inside[0]].start != start or self.buckets[inside[-1]].stop != stop:
            raise ValueError(f"{start} to {stop} is not made of whole buckets: {[b.start for b in self.buckets]}")
        return inside

    def between(self, start: int, stop: int) -> float:
        """Return the perplexity over the buckets that lie within positions ``start`` to ``stop``; nan without a token.

        Raises:
            ValueError: ``start`` or ``stop`` is not an edge of a bucket.
        """
        # Buckets hold different numbers of tokens, so their means are weighted.
        buckets = [bucket for bucket in map(self.buckets.__getitem__, self.inside(start, stop)) if bucket.tokens]
        if not buckets:
            return math.nan
        return _exp(sum(b.nll * b.tokens for b in buckets) / sum(b.tokens for b in buckets))


@dataclass(frozen=True, eq=False)
class Window:
    """Tokens ``start:stop`` of a document; those from position ``scored`` on are scored, and the others are context.

    The special tokens of the document replace the first tokens, so that every window begins with them.
    """

    document: int
    start: int
    stop: int
    scored: int
    source: TokenDocument

    @property
    def ids(self) -> Tensor:
        """Token ids of the window (tokens,)."""
        special = self.source.ids.new_tensor(self.source.prefix)
        return torch.cat((special, self.source.ids[self.start + len(special) : self.stop]))

    @property
    def key_tokens(self) -> Tensor | None:
        """Which tokens of the window are key tokens (tokens,) bool; None if nobody looked for them."""
        marked = self.source.key_tokens
        return None if marked is None else marked[self.start : self.stop]

    @property
    def bytes(self) -> int | None:
        """Number of UTF-8 bytes of the scored tokens; None if they came without their text."""
        ends = self.source.ends
        return None if ends is None else int(ends[self.stop - 1] - ends[self.scored - 1])


def sum_up(
    scored: Iterable[tuple[Window, Mapping[str, Any]]], edges: Sequence[int], *, window: int, stride: int, chunk: int
) -> PerplexityResult:
    """Return the result of windows.

    Args:
        scored: the windows, document by document, with their sums of losses and tokens, by bucket and in all; those of
            key tokens within them are under ``key_tokens``.
        edges: edges of the buckets [tokens].
        window: length of the windows [tokens].
        stride: distance between the starts of consecutive windows [tokens].
        chunk: length of a forward pass [tokens].

    Raises:
        ValueError: no token was scored.
    """
    documents: dict[int, list[DocumentScore]] = {}
    names = {}
    of_key_tokens = []
    longest = 0
    for item, part in scored:
        longest = max(longest, item.stop - item.start)
        if "key_tokens" in part:
            of_key_tokens.append((item, part["key_tokens"]))
        score = DocumentScore(
            name=f"{item.source.name}[{item.start}:{item.stop}]",
            tokens=tuple(part["tokens"]),
            nll=tuple(part["nll"]),
            total_tokens=part["total_tokens"],
            total_nll=part["total_nll"],
            # The bytes are those of all its tokens.
            bytes=item.bytes if part["total_tokens"] == item.stop - item.scored else None,
        )
        documents.setdefault(item.document, []).append(score)
        names[item.document] = item.source.name
    if not documents:
        raise ValueError("nothing to score: no document has two tokens")
    if len(documents) == 1:
        (units,) = documents.values()
    else:
        # sum() rounds otherwise in newer releases of Python.
        joined = {number: functools.reduce(operator.add, windows) for number, windows in documents.items()}
        units = [replace(score, name=names[number]) for number, score in joined.items()]
    whole = functools.reduce(operator.add, units)
    buckets = []
    for (start, stop), tokens, nll in zip(itertools.pairwise(edges), whole.tokens, whole.nll, strict=True):
        if start < longest:
            buckets.append(Bucket(start, stop, tokens, nll / tokens if tokens else math.nan))
    bits = None
    if whole.bytes:
        bits = whole.total_nll / math.log(2) / whole.bytes
    key_tokens = None
    if of_key_tokens:
        key_tokens = sum_up(of_key_tokens, edges, window=window, stride=stride, chunk=chunk)
    return PerplexityResult(
        nll=whole.total_nll / whole.total_tokens,
        tokens=whole.total_tokens,
        bits_per_byte=bits,
        windows=sum(map(len, documents.values())),
        window=window,
        stride=stride,
        chunk=chunk,
        buckets=tuple(buckets),
        documents=tuple(units),
        key_tokens=key_tokens,
    )
