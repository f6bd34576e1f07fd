"""Attention over a quantized cache in one pass, exactly as if the text had been decoded token by token.

For each query, keys and values inside its residual window, its sinks and its unfinished block count in full precision,
all others as their format holds them. A block of queries at a time, so that no ``(tokens, tokens)`` array exists.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from rope_patch.modeling.temporary_modes import attending_with

if TYPE_CHECKING:
    from rope_patch.kv_cache.layer import QuantizedLayer, SchemeRun

ATTENTION_NAME = "rope_patch_kv_cache"
BLOCK_BYTES = 1 << 22
"""Logits of one block of queries [bytes]: few enough to stay in the CPU's cache, and to skip most later keys."""


@dataclass(eq=False)
class _Reading:
    """A model that attends through :func:`attend`: its runs, the latest last, and what ends it."""

    runs: list[SchemeRun] = field(default_factory=list)
    end: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


_READING: WeakKeyDictionary[nn.Module, _Reading] = WeakKeyDictionary()
"""By attention module."""


@contextlib.contextmanager
def attending_by(run: SchemeRun, model: nn.Module) -> Iterator[None]:
    """Let a model attend through :func:`attend`, by a run's plans; of several runs the latest counts.

    Models have runs of their own, and runs may end in any order.
    """
    modules = [module for module in model.modules() if hasattr(module, "layer_idx")]
    reading = next((_READING[module] for module in modules if module in _READING), None) or _Reading()
    if not reading.runs:
        for module in modules:
            _READING[module] = reading
            reading.end.callback(_READING.pop, module, None)
        reading.end.enter_context(attending_with(model, ATTENTION_NAME))
    reading.runs.append(run)
    try:
        yield
    finally:
        reading.runs.remove(run)
        if not reading.runs:
            reading.end.close()


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend through the cache of the run at hand; see AttentionInterface."""
    reading = _READING.get(module)
    if reading is None:
        raise RuntimeError("attend only within rope_patch.kv_cache.quantized")
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} attends with {name}: quantized caches know logits of q·k alone")
    rows, heads, size, width = query.shape
    index = int(module.layer_idx)  # type: ignore[arg-type]
    run, store = _store(reading.runs, index, size, key, value)
    total = store.raw_keys.shape[-2]
    store.freeze(total)
    groups = store.raw_keys.shape[1]
    scaling = scaling or width**-0.5
    if run.observe is not None:
        run.observe(index, query, key, value, scaling)
    window = run.plans[index].layer.window or total
    if attention_mask is not None and size == total and store.padding is None:
        seen_first = attention_mask[:, :, 0, 0]
        if not bool((seen_first if seen_first.dtype == torch.bool else seen_first == 0).all()):
            raise ValueError("rows are padded on the left: make their cache with past_key_values=factory(padding=…)")
    before = total - size
    places = torch.arange(total, device=query.device)
    step = max(1, min(size, BLOCK_BYTES // (4 * rows * heads * total)))
    out = torch.empty(rows, size, heads, value.shape[-1], dtype=value.dtype, device=value.device)
    for low in range(0, size, step):
        high = min(low + step, size)
        left, right = max(0, before + low - window + 1), before + high
        # Queries that share a key head follow each other.
        queries = query[:, :, low:high].reshape(rows, groups, -1, width)
        at = slice(left, right)

        def dot(states: Tensor, queries: Tensor = queries, at: slice = at, count: int = high - low) -> Tensor:
            return (queries @ states[:, :, at].mT).view(rows, heads, count, -1)

        visible_tokens = places[before + low : before + high, None] + 1
        frozen = _frozen(store, "keys", visible_tokens, places[at])
        logits = dot(store.raw_keys)
        if frozen is not None:
            logits = torch.where(frozen, dot(store.keys), logits)
        logits = logits * scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        apart = visible_tokens - 1 - places[at]
        hidden = (apart < 0) | (apart >= window)
        logits = logits.masked_fill(hidden, -torch.inf)
        if attention_mask is not None:
            mask = attention_mask[:, :, low:high, at]
            logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        weights = logits.softmax(-1, dtype=dtype).nan_to_num().to(value.dtype)  # padding sees nothing

        def read(part: Tensor, states: Tensor, at: slice = at) -> Tensor:
            return part.view(rows, groups, -1, part.shape[-1]) @ states[:, :, at]

        frozen = _frozen(store, "values", visible_tokens, places[at])
        if frozen is None:
            got = read(weights, store.raw_values)
        else:
            got = read(weights * frozen, store.values) + read(weights * ~frozen, store.raw_values)
        out[:, low:high] = got.view(rows, heads, high - low, -1).transpose(1, 2)
    return out, None


def _store(
    runs: Sequence[SchemeRun], index: int, size: int, key: Tensor, value: Tensor
) -> tuple[SchemeRun, QuantizedLayer]:
    """Return the cache layer that a pass reads: the layer's own, one that it shares, or one of these states alone."""
    for run in reversed(runs):
        for stored in run.stored.values():
            if stored.returned is key:
                return run, stored
    if key.shape[-2] != size and runs[-1].plans[index].layer.keys_of == index:
        raise ValueError("these keys come from another cache: use a cache of the factory, or none")
    return runs[-1], runs[-1].alone(index, key, value)


def _frozen(store: QuantizedLayer, name: str, visible_tokens: Tensor, places: Tensor) -> Tensor | None:
    """Return which keys each query sees quantized: (rows or 1, 1, queries, keys) bool; None where none ever is."""
    if store.plan.sides[name].format == "none":
        return None
    pads = [0] if store.padding is None else store.padding.tolist()
    masks = []
    for pad in pads:
        base = store.plan.scheme.sinks + pad
        masks.append((places >= base) & (places < store.plan.frozen(name, visible_tokens, pad)))
    return torch.stack(masks)[:, None]


def padding_mask(**kwargs: Any) -> Tensor | None:
    """No mask where rows are not padded: attention knows what is causal and what a window hides."""
    if not kwargs.get("allow_is_causal_skip", True):
        raise ValueError(
            "quantized caches read one text per row, with causal attention: texts packed into one row are not "
            "supported, nor tokens that attend to later ones"
        )
    return None if kwargs.get("attention_mask") is None else sdpa_mask(**{**kwargs, "allow_is_causal_skip": False})


AttentionInterface.register(ATTENTION_NAME, attend)
AttentionMaskInterface.register(ATTENTION_NAME, padding_mask)
