"""Perplexity by position and by document, computed without the logits of all tokens, ``[tokens, vocab]``, in memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from rope_patch.evaluation.finished_work import Resume, finished_work
from rope_patch.evaluation.perplexity.result import PerplexityResult, Window, sum_up
from rope_patch.evaluation.read_across_processes import read_batches
from rope_patch.modeling.inputs import check_ids, tensor_hash
from rope_patch.modeling.reader import CacheFactory, KnownStates, Reader, cache_identity, losses
from rope_patch.modeling.temporary_modes import in_eval_mode
from rope_patch.runtime import progress
from rope_patch.runtime.result_cache import key
from rope_patch.texts.documents import TokenDocument


# Long: the public function, whose options are documented one by one.
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
    resume: Resume = None,
    known: KnownStates | None = None,
) -> PerplexityResult:
    """Return the perplexity of a text under a causal language model.

    Log-probabilities are computed in float32, from one slice of the last hidden states at a time. Each window is a
    forward pass of its own, in chunks through a cache if ``chunk`` is given, and begins with the special tokens of its
    document. Where windows overlap, each token is scored once, in the window that gives it the most context. The last
    window of a document is moved back so that it ends with the text, and all of it is scored.

    Args:
        model: a causal language model of transformers.
        token_ids: one text as a tensor or list of ids (tokens,); or rows (windows, tokens), each of which is a document
            of one window; or an iterable of documents, which are read one at a time, as
            :func:`~rope_patch.texts.documents.encode` yields them.
        stride: distance between the starts of windows [tokens]; by default, and at most, as many as a window has
            besides the special tokens, so that windows do not overlap.
        chunk: length of a forward pass [tokens]; by default the window, or less if the model has sliding windows.
        buckets: edges of the position ranges, such as (0, 64, 256, 1024) [tokens]; one range by default. Ranges that no
            token falls into are left out of the result.
        cache: a factory without arguments, which returns the cache to read through; by default a ``DynamicCache`` if
            the window is read in chunks.
        window: length of a window, special tokens included [tokens]; by default the whole text. Documents need it.
        batch: number of windows in a forward pass; shorter ones are padded on the right.
        resume: file (or mapping) in which scored windows are stored, so that an interrupted run continues where it
            stopped. With a ``cache`` this requires that the factory has an ``identity``, a text that tells it from
            others.
        known: function of the token ids of a window (tokens,), which returns the last hidden states (tokens, hidden)
            that are known, so that it is not read again, or None; for windows that are read one at a time.

    Returns:
        The result.

    Raises:
        ValueError: shapes, edges or lengths do not fit, there is nothing to score, or logits are not finite.
    """
    documents, window, stride = _as_documents(token_ids, window, stride)
    reader = Reader(model)
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be >= 1 token, got {chunk}")
    chunk = reader.chunk(window, chunk, cache)
    edges = list(buckets) if buckets is not None else [0, window]
    # The token at position 0 is never predicted, so a first range that ends at 1 would always be empty.
    if len(edges) < 2 or edges != sorted(set(edges)) or edges[0] < 0 or edges[-1] > window or edges[1] < 2:
        raise ValueError(
            f"the edges of buckets must rise between 0 and {window}, and the first must be > 1, got {edges}"
        )
    if batch < 1:
        raise ValueError(f"batch must be >= 1, got {batch}")
    # Another cache, other chunks or other ranges give other numbers, so they are part of every key.
    settings = {"edges": edges, "chunk": chunk} | cache_identity(cache, resume is not None)

    def name(item: Window, model: str) -> str:
        # The key holds the tokens and not the place of the window: equal windows are read once.
        place: dict[str, Any] = {"ids": tensor_hash(item.ids), "first": item.scored - item.start}
        if item.key_tokens is not None:
            place["key_tokens"] = tensor_hash(item.key_tokens)
        return key(what="perplexity", model=model, **place, **settings)

    def score(items: list[Window]) -> list[dict[str, Any]]:
        """Return the sums of each window by bucket."""
        sums = []
        for item, loss in window_losses(reader, items, chunk=chunk, cache=cache, known=known):
            is_scored = torch.arange(item.start, item.stop) >= item.scored
            part = sums_by_position(item, loss, is_scored, edges)
            if item.key_tokens is not None:
                part["key_tokens"] = sums_by_position(item, loss, is_scored & item.key_tokens, edges)
            sums.append(part)
        return sums

    scored = read_batches(
        model,
        batched(sliding_windows(documents, window, stride, reader), batch),
        score=score,
        name=name,
        tokens=lambda item: item.stop - item.start,
        work=finished_work(model, resume, window, cache),
    )
    with in_eval_mode(model):
        return sum_up(scored, edges, window=window, stride=stride, chunk=chunk)


def _as_documents(
    token_ids: Tensor | Sequence[int] | Iterable[TokenDocument], window: int | None, stride: int | None
) -> tuple[Iterable[TokenDocument], int, int]:
    if isinstance(token_ids, list | tuple) and token_ids and all(isinstance(i, int) for i in token_ids):
        token_ids = torch.tensor(token_ids)
    if isinstance(token_ids, Tensor):
        if token_ids.ndim not in (1, 2):
            raise ValueError(f"token_ids must have one or two axes, got shape {tuple(token_ids.shape)}")
        if token_ids.ndim == 2 and (window is not None or stride is not None):
            raise ValueError("token_ids with two axes are windows already: give neither window nor stride")
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


def window_losses(reader: Reader, items: Sequence[Window], **options: Any) -> Iterator[tuple[Window, Tensor]]:
    """Yield windows, which are read as one batch, with the loss of each of their tokens (tokens,) [nats].

    Args:
        reader: the model, taken apart.
        items: the windows.
        **options: ``chunk``, ``cache`` and ``known`` of :func:`~rope_patch.modeling.reader.losses`.
    """
    rows = torch.nn.utils.rnn.pad_sequence([item.ids for item in items], batch_first=True)
    sizes = [len(item.ids) for item in items]
    # Shorter windows are padded to the longest, and the padding is computed too.
    with progress.work(sum(sizes), reads=rows.numel()):
        table = losses(reader, rows, [item.scored - item.start for item in items], lengths=sizes, **options)
    for item, size, loss in zip(items, sizes, table, strict=True):
        yield item, loss[:size]


def sliding_windows(documents: Iterable[TokenDocument], window: int, stride: int, reader: Reader) -> Iterator[Window]:
    """Yield the windows of documents, in each of which the tokens are scored that no window before it scored.

    Raises:
        ValueError: a window has no room for a token, or the model does not know a token id.
    """
    for number, document in enumerate(documents):
        if not isinstance(document, TokenDocument):
            raise TypeError(f"documents must come from encode(tokenizer, source), got {type(document).__name__}")
        size = len(document.ids)
        # The first token, and special tokens, are never predicted.
        done = max(1, len(document.prefix))
        if done >= window:
            raise ValueError(f"a window needs at least {done + 1} tokens to predict one, got {window}")
        if size <= done:
            continue
        try:
            ids = check_ids(document.ids, reader.vocabulary)
        except ValueError as error:
            raise ValueError(f"{document.name}: {error}") from None
        checked = replace(document, ids=ids)
        start = 0
        unscored = done
        step = min(stride, window - len(document.prefix))
        while done < size:
            stop = min(start + window, size)
            # The last window is moved back to the end of the text, so that its tokens have a full context too.
            start = max(0, stop - window)
            # The first token of a window has no context there, so it is never scored in it.
            first = max(done, start + unscored)
            if first < stop:
                yield Window(number, start, stop, first, checked)
            done = stop
            start += step


def batched(windows: Iterator[Window], size: int) -> Iterator[list[Window]]:
    """Yield windows in lists of one size; the last may be shorter."""
    while group := list(itertools.islice(windows, size)):
        yield group


def check_finite(item: Window, loss: Tensor, scored: Tensor) -> None:
    """Raise ValueError, which names the token, if a loss is not finite: it would make every mean NaN.

    Args:
        item: the window.
        loss: (tokens,) the loss of each token [nats].
        scored: (tokens,) bool, the tokens that count.

    Raises:
        ValueError: a loss is not finite.
    """
    broken = (scored & ~torch.isfinite(loss)).nonzero()
    if len(broken):
        raise ValueError(
            f"the loss at position {int(broken[0])} of window {item.start}:{item.stop} of {item.source.name} is not "
            "finite: NaN or infinite logits, try float32"
        )


def sums_by_position(item: Window, loss: Tensor, scored: Tensor, edges: Sequence[int]) -> dict[str, Any]:
    """Return the sums of a window's losses by bucket, as JSON values for the result cache.

    Args:
        item: the window, which an error names.
        loss: (tokens,) the loss of each token [nats].
        scored: (tokens,) bool, the tokens that count.
        edges: the edges of the buckets [tokens].

    Raises:
        ValueError: a loss is not finite.
    """
    check_finite(item, loss, scored)
    parts = [loss[a:b][scored[a:b]] for a, b in itertools.pairwise(edges)]
    return {
        "nll": [float(part.sum()) for part in parts],
        "tokens": [len(part) for part in parts],
        "total_nll": float(loss[scored].sum()),
        "total_tokens": int(scored.sum()),
    }
