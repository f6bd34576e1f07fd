"""Perplexity by position and by document, without ever holding ``[tokens, vocab]`` logits."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from rope_patch.evaluation.documents import TokenDocument
from rope_patch.evaluation.result_cache import ResultCache, key
from rope_patch.modeling.modes import in_eval_mode
from rope_patch.modeling.scoring import CacheFactory, Reader, cache_identity, fingerprint, losses

SCHEMA = 2


def _exp(nll: float) -> float:
    return math.exp(nll) if nll < 700 else math.inf


@dataclass(frozen=True)
class Bucket:
    """Loss of the tokens at positions ``start <= position < stop`` of their window.

    Attributes:
        start: first position [tokens]; the token at position 0 is never predicted.
        stop: one past the last [tokens].
        tokens: how many were scored.
        nll: mean negative log-likelihood [nats/token].
        stderr: standard error of the mean over documents [nats/token]; None for a single one.
    """

    start: int
    stop: int
    tokens: int
    nll: float
    stderr: float | None

    @property
    def perplexity(self) -> float:
        """``exp(nll)``."""
        return _exp(self.nll)


@dataclass(frozen=True)
class DocumentScore:
    """Loss of one document, or of one window where a single document was scored.

    Attributes:
        name: of the document; ``name[start:stop]`` of a window [tokens].
        tokens: scored, by bucket.
        nll: sum of the negative log-likelihoods, by bucket [nats].
        total_tokens: scored, in a bucket or not.
        total_nll: their sum [nats].
        bytes: UTF-8 bytes of the scored tokens; None when the tokens came without their text.
    """

    name: str
    tokens: tuple[int, ...]
    nll: tuple[float, ...]
    total_tokens: int
    total_nll: float
    bytes: int | None

    @property
    def bits_per_byte(self) -> float | None:
        """Code length of the text under the model, comparable between vocabularies."""
        return self.total_nll / math.log(2) / self.bytes if self.bytes else None


@dataclass(frozen=True)
class PerplexityResult:
    """Perplexity over documents, whole and by position.

    Attributes:
        nll: mean over all scored tokens [nats/token].
        stderr: its standard error over ``documents``; None for a single one.
        tokens: scored tokens.
        bits_per_byte: comparable between vocabularies; None when the tokens came without their text.
        windows: forward passes over text, each with a context of its own.
        window: their length [tokens].
        stride: tokens between the starts of consecutive windows of a document [tokens].
        chunk: tokens per forward pass [tokens].
        prefix: special tokens put in front of each document.
        skipped: documents with nothing to predict.
        buckets: the same by position.
        documents: each document's share, or each window's where there is a single document.
        schema: version of this layout.
    """

    nll: float
    stderr: float | None
    tokens: int
    bits_per_byte: float | None
    windows: int
    window: int
    stride: int
    chunk: int
    prefix: tuple[int, ...]
    skipped: int
    buckets: tuple[Bucket, ...]
    documents: tuple[DocumentScore, ...]
    schema: int = SCHEMA

    @property
    def perplexity(self) -> float:
        """``exp(nll)``."""
        return _exp(self.nll)

    def inside(self, start: int, stop: int) -> list[int]:
        """Return the indices of the buckets that make up positions ``start`` to ``stop``.

        Raises:
            ValueError: an edge that is not a bucket's.
        """
        found = [i for i, b in enumerate(self.buckets) if start <= b.start and b.stop <= stop]
        if not found or self.buckets[found[0]].start != start or self.buckets[found[-1]].stop != stop:
            raise ValueError(f"{start} to {stop} is not made of whole buckets: {[b.start for b in self.buckets]}")
        return found

    def between(self, start: int, stop: int) -> float:
        """Return the perplexity over the buckets that lie within positions ``start`` to ``stop``.

        Raises:
            ValueError: an edge that is not a bucket's.
        """
        made = [self.buckets[i] for i in self.inside(start, stop)]
        return _exp(sum(b.nll * b.tokens for b in made) / sum(b.tokens for b in made))

    def to_json(self) -> str:
        """Return the result as JSON."""
        return json.dumps(asdict(self), indent=1, allow_nan=False)


@dataclass(frozen=True, eq=False)
class _Window:
    """Tokens ``start:stop`` of a document, those from ``scored`` on to be scored."""

    document: int
    start: int
    stop: int
    scored: int
    source: TokenDocument

    @property
    def ids(self) -> Tensor:
        return self.source.ids[self.start : self.stop]

    def bytes_between(self, low: int, high: int) -> int | None:
        ends = self.source.ends
        return None if ends is None else int(ends[high - 1] - (ends[low - 1] if low else 0))


@torch.no_grad()
def perplexity(
    model: nn.Module,
    token_ids: Tensor | Sequence[int] | Iterable[TokenDocument],
    *,
    stride: int | None = None,
    chunk: int | None = None,
    buckets: Sequence[int] | None = None,
    cache: CacheFactory | None = None,
    window: int | None = None,
    batch: int = 1,
    resume: str | Path | MutableMapping[str, Any] | None = None,
    on_progress: Callable[[int], None] = lambda _: None,
) -> PerplexityResult:
    """Score a text under a causal language model: log-probabilities in float32 over slices of the last hidden state.

    Each window is a forward pass of its own, in chunks through a cache when ``chunk`` is given. With ``stride`` below
    ``window`` the windows overlap and each token is scored once, in the window that gives it the most context. The last
    window of a document is moved back so that it ends with the text: all of it is scored, with at least the context
    that the stride promises.

    Args:
        model: a causal language model of transformers.
        token_ids: (tokens,) one text, a tensor or a list of ids; (windows, tokens) rows, each a document that is one
            window; or an iterable of documents as :func:`~rope_patch.evaluation.documents.encode` yields them, read
            one at a time.
        stride: tokens between window starts; the window by default (no overlap).
        chunk: tokens per forward pass; the window by default.
        buckets: inner and outer position edges, such as (0, 64, 256, 1024); one bucket by default. Those that no
            token falls into are left out of the result.
        cache: zero-argument factory of a cache to run through; a ``DynamicCache`` by default when chunked.
        window: window length; the whole text by default. Documents from an iterable need it.
        batch: windows per forward pass; shorter ones are padded on the right.
        resume: file (or mapping) in which scored windows are kept, so that an interrupted run goes on where it was.
            With a ``cache`` only if that has an ``identity``, a text that tells it from others.
        on_progress: called with the number of tokens done after each window.

    Returns:
        The result.

    Raises:
        ValueError: shapes, edges or lengths that do not fit, nothing to score, or logits that are not finite.
    """
    documents, window, stride = _as_documents(token_ids, window, stride)
    chunk = window if chunk is None else chunk
    if not 1 <= chunk <= window:
        raise ValueError(f"chunk must be in [1, {window}] tokens, got {chunk}")
    edges = list(buckets) if buckets is not None else [0, window]
    if len(edges) < 2 or edges != sorted(set(edges)) or edges[0] < 0 or edges[-1] > window or edges[1] < 2:
        raise ValueError(f"buckets must rise within 0 and {window}, the first past position 1, got {edges}")
    if batch < 1:
        raise ValueError(f"batch must be >= 1, got {batch}")
    known = cache_identity(cache, resume is not None)
    reader = Reader(model)
    kept: MutableMapping[str, Any] = {}
    if resume is not None:
        kept = ResultCache(resume) if isinstance(resume, str | Path) else resume
    identity = {"edges": edges, "chunk": chunk, "model": fingerprint(model) if resume is not None else ""} | known
    tally = _Tally(edges)
    with in_eval_mode(model):
        for group in _batched(_windows(documents, window, stride, tally, reader), batch):
            names = [_key(item, identity) if resume is not None else str(i) for i, item in enumerate(group)]
            # Equal windows have one name, and are scored once.
            todo = {name: item for name, item in zip(names, group, strict=True) if name not in kept}
            parts = _score(reader, list(todo.values()), edges, chunk if chunk < window else None, cache)
            fresh = dict(zip(todo, parts, strict=True))
            for item, name in zip(group, names, strict=True):
                if resume is not None and name not in kept:
                    kept[name] = fresh[name]
                tally.add(item, kept[name] if name in kept else fresh[name])
                on_progress(item.stop - item.start)
    return tally.result(window=window, stride=stride, chunk=chunk)


def _as_documents(
    token_ids: Tensor | Sequence[int] | Iterable[TokenDocument], window: int | None, stride: int | None
) -> tuple[Iterable[TokenDocument], int, int]:
    if isinstance(token_ids, list | tuple) and token_ids and all(isinstance(i, int) for i in token_ids):
        token_ids = torch.tensor(token_ids)
    if isinstance(token_ids, Tensor):
        if token_ids.ndim not in (1, 2):
            raise ValueError(f"token_ids must have one or two axes, got shape {tuple(token_ids.shape)}")
        if token_ids.ndim == 2:
            if window is not None or stride is not None:
                raise ValueError("token_ids with two axes are windows already: give neither window nor stride")
            if not len(token_ids):
                raise ValueError("no window to score")
        window = token_ids.shape[-1] if window is None else window
        if token_ids.ndim == 1 and 2 <= len(token_ids) < window:
            raise ValueError(f"the text has {len(token_ids)} tokens, less than one window of {window}")
        rows = token_ids[None] if token_ids.ndim == 1 else token_ids
        documents: Iterable[TokenDocument] = [TokenDocument(f"row {i}", row) for i, row in enumerate(rows)]
    else:
        if window is None:
            raise ValueError("documents need window=: how many tokens a forward pass may see")
        documents = cast("Iterable[TokenDocument]", token_ids)
    if window < 2:
        raise ValueError(f"a window needs at least 2 tokens to predict one, got {window}")
    stride = window if stride is None else stride
    if not 1 <= stride <= window:
        raise ValueError(f"stride must be in [1, {window}] tokens, got {stride}")
    return documents, window, stride


def _windows(
    documents: Iterable[TokenDocument], window: int, stride: int, tally: _Tally, reader: Reader
) -> Iterator[_Window]:
    for number, document in enumerate(documents):
        if not isinstance(document, TokenDocument):
            raise TypeError(f"documents must come from encode(tokenizer, source), got {type(document).__name__}")
        size = len(document.ids)
        if size < 2:
            tally.skipped += 1
            continue
        try:
            ids = reader.check(document.ids)
        except ValueError as error:
            raise ValueError(str(error) if number == 0 else f"{document.name}: {error}") from None
        checked = TokenDocument(document.name, ids, document.ends, document.prefix)
        start, done = 0, 1  # the first token is never predicted
        while done < size:
            stop = min(start + window, size)
            start = max(0, stop - window)
            first = max(done, start + 1)
            if first < stop:
                yield _Window(number, start, stop, first, checked)
            done, start = stop, start + stride


def _batched(windows: Iterator[_Window], size: int) -> Iterator[list[_Window]]:
    while group := list(itertools.islice(windows, size)):
        yield group


def _key(item: _Window, identity: dict[str, Any]) -> str:
    ids = hashlib.sha256(item.ids.cpu().numpy().tobytes()).hexdigest()
    return key(what="perplexity", schema=SCHEMA, ids=ids, first=item.scored - item.start, **identity)


def _score(
    reader: Reader, group: Sequence[_Window], edges: Sequence[int], chunk: int | None, cache: CacheFactory | None
) -> list[dict[str, Any]]:
    """Sums by bucket of each window: JSON values, as they are kept."""
    if not group:
        return []
    rows = torch.nn.utils.rnn.pad_sequence([item.ids for item in group], batch_first=True)
    first = [item.scored - item.start for item in group]
    sizes = [len(item.ids) for item in group]
    table, _ = losses(reader, rows, first, lengths=sizes, chunk=chunk, cache=cache)
    made = []
    for item, low, size, loss in zip(group, first, sizes, table, strict=True):
        part = loss[low:size]
        if not bool(torch.isfinite(part).all()):
            at = low + int((~torch.isfinite(part)).nonzero()[0])
            raise ValueError(
                f"the loss at position {at} of window {item.start}:{item.stop} of {item.source.name} is not finite: "
                "NaN or infinite logits, try float32"
            )
        sums, counts = [], []
        for start, stop in itertools.pairwise(edges):
            inside = loss[max(start, low) : max(min(stop, size), low, start)]
            sums.append(float(inside.sum()))
            counts.append(len(inside))
        made.append({"nll": sums, "tokens": counts, "total_nll": float(part.sum()), "total_tokens": len(part)})
    return made


class _Tally:
    """Sums by document, and by window until there is a second document."""

    def __init__(self, edges: Sequence[int]) -> None:
        self.edges, self.skipped = edges, 0
        self.windows: list[DocumentScore] = []
        self.documents: dict[int, DocumentScore] = {}
        self.prefix: tuple[int, ...] = ()
        self.count = 0

    def add(self, item: _Window, part: dict[str, Any]) -> None:
        size = item.bytes_between(item.scored, item.stop)
        total = (part["total_tokens"], part["total_nll"])
        self.count += 1
        self.prefix = item.source.prefix
        name = item.source.name
        before = self.documents.get(item.document)
        if len(self.documents) < 2:
            at = f"{name}[{item.start}:{item.stop}]"
            self.windows.append(DocumentScore(at, tuple(part["tokens"]), tuple(part["nll"]), *total, size))
        if before is None:
            self.documents[item.document] = DocumentScore(name, tuple(part["tokens"]), tuple(part["nll"]), *total, size)
            return
        self.documents[item.document] = DocumentScore(
            name,
            tuple(a + b for a, b in zip(before.tokens, part["tokens"], strict=True)),
            tuple(a + b for a, b in zip(before.nll, part["nll"], strict=True)),
            before.total_tokens + total[0],
            before.total_nll + total[1],
            None if size is None or before.bytes is None else before.bytes + size,
        )

    def result(self, *, window: int, stride: int, chunk: int) -> PerplexityResult:
        units = list(self.documents.values()) if len(self.documents) > 1 else self.windows
        if not units:
            raise ValueError(f"nothing to score: {self.skipped} documents, none with two tokens")
        nll, stderr, tokens = _mean([(u.total_tokens, u.total_nll) for u in units])
        made = []
        for i, (start, stop) in enumerate(itertools.pairwise(self.edges)):
            part = [(u.tokens[i], u.nll[i]) for u in units if u.tokens[i]]
            if not part:
                continue
            mean, error, count = _mean(part)
            made.append(Bucket(start, stop, count, mean, error))
        sizes = [u.bytes for u in units]
        total = None if None in sizes else sum(size for size in sizes if size is not None)
        bits = sum(u.total_nll for u in units) / math.log(2) / total if total else None
        return PerplexityResult(
            nll=nll,
            stderr=stderr,
            tokens=tokens,
            bits_per_byte=bits,
            windows=self.count,
            window=window,
            stride=stride,
            chunk=chunk,
            prefix=self.prefix,
            skipped=self.skipped,
            buckets=tuple(made),
            documents=tuple(units),
        )


def _mean(parts: Sequence[tuple[int, float]]) -> tuple[float, float | None, int]:
    """Mean per token, its standard error over units of unequal size (linearised ratio), and the tokens.

    *Source*: Cochran, Sampling Techniques (1977), section 2.11. For units of equal size it is the usual one.
    """
    tokens, total = sum(n for n, _ in parts), sum(s for _, s in parts)
    mean = total / tokens
    if len(parts) < 2:
        return mean, None, tokens
    spread = sum((s - mean * n) ** 2 for n, s in parts) * len(parts) / (len(parts) - 1)
    return mean, math.sqrt(spread) / tokens, tokens
