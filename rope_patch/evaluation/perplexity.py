"""Perplexity by position, without ever holding ``[tokens, vocab]`` logits."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

SCHEMA = 1
SLICE = 256
"""Tokens whose logits exist at one time."""


@dataclass(frozen=True)
class Bucket:
    """Loss of the tokens at positions ``start <= position < stop`` of their window.

    Attributes:
        start: first position [tokens]; the token at position 0 is never predicted.
        stop: one past the last [tokens].
        tokens: how many were scored.
        nll: mean negative log-likelihood [nats/token].
        stderr: standard error of the mean over windows [nats/token]; None for a single window.
    """

    start: int
    stop: int
    tokens: int
    nll: float
    stderr: float | None

    @property
    def perplexity(self) -> float:
        """``exp(nll)``."""
        return math.exp(self.nll)


@dataclass(frozen=True)
class PerplexityResult:
    """Perplexity over windows, whole and by position.

    Attributes:
        nll: mean over all scored tokens [nats/token].
        stderr: its standard error over windows; None for a single window.
        tokens: scored tokens.
        windows: independent windows.
        window: their length [tokens].
        stride: tokens between the starts of consecutive windows [tokens].
        chunk: tokens per forward pass [tokens].
        buckets: the same by position.
        schema: version of this layout.
    """

    nll: float
    stderr: float | None
    tokens: int
    windows: int
    window: int
    stride: int
    chunk: int
    buckets: tuple[Bucket, ...]
    schema: int = SCHEMA

    @property
    def perplexity(self) -> float:
        """``exp(nll)``."""
        return math.exp(self.nll)

    def between(self, start: int, stop: int) -> float:
        """Return the perplexity over the buckets that lie within positions ``start`` to ``stop``.

        Raises:
            ValueError: an edge that is not a bucket's.
        """
        inside = [b for b in self.buckets if start <= b.start and b.stop <= stop]
        if not inside or inside[0].start != start or inside[-1].stop != stop:
            raise ValueError(f"{start} to {stop} is not made of whole buckets: {[b.start for b in self.buckets]}")
        return math.exp(sum(b.nll * b.tokens for b in inside) / sum(b.tokens for b in inside))

    def to_json(self) -> str:
        """Return the result as JSON."""
        return json.dumps(asdict(self), indent=1, allow_nan=False)


@torch.no_grad()
def perplexity(
    model: nn.Module,
    token_ids: Tensor,
    *,
    stride: int | None = None,
    chunk: int | None = None,
    buckets: Sequence[int] | None = None,
    cache: Callable[[], Any] | None = None,
    window: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> PerplexityResult:
    """Score a text under a causal language model: log-probabilities in float32 over slices of the last hidden state.

    Each window is a forward pass of its own, in chunks through a cache when ``chunk`` is given. With ``stride`` below
    ``window`` the windows overlap and each token is scored once, in the window that gives it the most context.

    Args:
        model: a causal language model of transformers.
        token_ids: (tokens,) one text, cut into windows; or (windows, tokens) rows that are windows already.
        stride: tokens between window starts; the window by default (no overlap).
        chunk: tokens per forward pass; the window by default.
        buckets: inner and outer position edges, such as (0, 64, 256, 1024); one bucket by default.
        cache: zero-argument factory of a cache to run through; a ``DynamicCache`` by default when chunked.
        window: window length of a 1-D text; the whole text by default.
        progress: told the number of tokens done after each window.

    Returns:
        The result; a remainder shorter than a window is not scored.

    Raises:
        ValueError: shapes, edges or lengths that do not fit, or logits that are not finite.
    """
    rows, window, stride = _windows(token_ids, window, stride)
    vocabulary = model.get_output_embeddings().weight.shape[0]  # type: ignore[operator]
    if rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool:
        raise ValueError(f"token_ids must be whole numbers, got {rows.dtype}")
    rows = rows.long()
    if int(rows.min()) < 0 or int(rows.max()) >= vocabulary:
        raise ValueError(f"token ids must be in [0, {vocabulary}), got {int(rows.min())} to {int(rows.max())}")
    chunk = window if chunk is None else chunk
    if not 1 <= chunk <= window:
        raise ValueError(f"chunk must be in [1, {window}] tokens, got {chunk}")
    edges = list(buckets) if buckets is not None else [0, window]
    if len(edges) < 2 or edges != sorted(set(edges)) or edges[0] < 0 or edges[-1] > window or edges[1] < 2:
        raise ValueError(f"buckets must rise within 0 and {window}, the first past position 1, got {edges}")
    losses = []
    with in_eval_mode(model):
        for i, row in enumerate(rows):
            loss = _losses(model, row, chunk, cache, i)
            # In all windows but the first, the tokens before the overlap's end were scored already.
            if i and token_ids.ndim == 1:
                loss[: window - stride] = math.nan
            losses.append(loss)
            progress(window)
    table = torch.stack(losses)  # (windows, window), nan where not scored
    made = tuple(_bucket(table, start, stop) for start, stop in itertools.pairwise(edges))
    whole = _bucket(table, 0, window)
    return PerplexityResult(whole.nll, whole.stderr, whole.tokens, len(rows), window, stride, chunk, made)


@contextlib.contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Measure without dropout, and with the caches that training with checkpointing switches off."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _windows(token_ids: Tensor, window: int | None, stride: int | None) -> tuple[Tensor, int, int]:
    if token_ids.ndim == 2:
        if window is not None or stride is not None:
            raise ValueError("token_ids with two axes are windows already: give neither window nor stride")
        window = stride = token_ids.shape[1]
        rows = token_ids
    elif token_ids.ndim == 1:
        window = len(token_ids) if window is None else window
        if window < 2:
            raise ValueError(f"a window needs at least 2 tokens to predict one, got {window}")
        stride = window if stride is None else stride
        if not 1 <= stride <= window:
            raise ValueError(f"stride must be in [1, {window}] tokens, got {stride}")
        if len(token_ids) < window:
            raise ValueError(f"the text has {len(token_ids)} tokens, less than one window of {window}")
        rows = token_ids.unfold(0, window, stride)
    else:
        raise ValueError(f"token_ids must have one or two axes, got shape {tuple(token_ids.shape)}")
    if window < 2:
        raise ValueError(f"a window needs at least 2 tokens to predict one, got {window}")
    if len(rows) == 0:
        raise ValueError("no window to score")
    return rows, window, stride


def _losses(model: Any, row: Tensor, chunk: int, cache: Callable[[], Any] | None, index: int) -> Tensor:
    """Negative log-likelihood of each token of a window: (window,) float64, nan at position 0."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    config = model.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    # Cohere multiplies its logits, Granite divides them.
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    device = head.weight.device
    row = row.to(device)
    past = cache() if cache is not None else DynamicCache(config=model.config) if chunk < len(row) else None
    loss = torch.full((len(row),), math.nan, dtype=torch.float64)
    for start in range(0, len(row), chunk):
        ids = row[None, start : start + chunk]
        out = decoder(input_ids=ids, past_key_values=past, use_cache=past is not None)
        hidden = out.last_hidden_state[0]
        targets = row[start + 1 : start + 1 + len(hidden)]
        for low in range(0, len(targets), SLICE):
            wanted = targets[low : low + SLICE]
            logits = head(hidden[low : low + len(wanted)].to(head.weight.dtype)).float() * scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            nll = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
            first = start + low + 1
            if not bool(torch.isfinite(nll).all()):
                at = first + int((~torch.isfinite(nll)).nonzero()[0])
                raise ValueError(f"the loss at position {at} of window {index} is not finite: NaN or infinite logits")
            loss[first : first + len(wanted)] = nll.double().cpu()
    return loss


def _bucket(table: Tensor, start: int, stop: int) -> Bucket:
    part = table[:, start:stop]
    scored = ~part.isnan()
    tokens = int(scored.sum())
    if tokens == 0:
        raise ValueError(f"no token is scored at positions {start} to {stop}")
    per_window = part.nansum(1)[scored.any(1)] / scored.sum(1)[scored.any(1)]
    stderr = float(per_window.std() / math.sqrt(len(per_window))) if len(per_window) > 1 else None
    return Bucket(start, stop, tokens, float(part.nansum() / tokens), stderr)
