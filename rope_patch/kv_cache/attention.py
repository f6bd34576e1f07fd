"""Attention over a quantized cache in one pass, exactly as if the text had been decoded token by token.

Each query reads the keys and values in its residual window, its sinks and its unfinished block in full precision, and
all others quantized. Queries are processed in blocks, so that no ``(tokens, tokens)`` array exists.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from rope_patch.kv_cache.block_rounding import at_least_float
from rope_patch.kv_cache.layer import QuantizedLayer, SchemeRun
from rope_patch.modeling.read_at_once import CACHE_BLOCK_BYTES, GPU_CACHE_BLOCK_BYTES
from rope_patch.modeling.temporary_modes import attending_with, attention_state

ATTENTION_NAME = "rope_patch_kv_cache"

PADDED = "quantized caches take no rows that are padded on the left: read such rows one by one, or pad on the right"


@dataclass(eq=False)
class _Reading:
    """A model that attends through :func:`attend`.

    Attributes:
        runs: the runs of the model, the latest last.
        end: the stack that gives the model its own attention back when the last run ends.
    """

    runs: list[SchemeRun] = field(default_factory=list)
    end: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


@contextlib.contextmanager
def attending_by(run: SchemeRun, model: nn.Module) -> Iterator[None]:
    """Let a model attend through :func:`attend` by the plans of a run, within a ``with`` block.

    Of several runs of a model the latest counts, and they may end in any order.

    Args:
        run: the run, with the plan of each layer.
        model: the model of transformers.
    """
    reading: _Reading = attention_state(model) or _Reading()
    if not reading.runs:
        reading.end.enter_context(attending_with(model, ATTENTION_NAME, reading))
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
    """Attend through the cache of the present run, with the arguments of transformers' ``AttentionInterface``."""
    reading: _Reading | None = attention_state(module)
    if reading is None:
        raise RuntimeError("attend only within rope_patch.kv_cache.quantized")
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} attends with {name}: quantized caches know logits of q·k alone")
    rows, heads, size, width = query.shape
    index = int(module.layer_idx)  # type: ignore[arg-type]
    store = _store(reading.runs, index, size, key, value)
    run = store.run
    total = store.raw_keys.shape[-2]
    # All blocks that the last query reads quantized; for earlier queries _frozen tells which of them already are.
    store.freeze(total)
    groups = store.raw_keys.shape[1]
    scaling = scaling or width**-0.5
    if run.observe is not None:
        run.observe(index, query, key, value, scaling)
    window = run.plans[index].layer.window or total
    if size == total and attention_mask is not None:
        # Whether the first token of a row is hidden: blocks would begin with its padding.
        padded = _masked(query.new_zeros(()), attention_mask[..., 0, 0]).any()
        if bool(padded):
            raise ValueError(PADDED)
    # In half precision, logits of long keys (a bias of 239 in Qwen2.5) would be rounded as coarsely as a cache rounds.
    raw_keys, keys, query = (at_least_float(states) for states in (store.raw_keys, store.keys, query))
    before = total - size
    places = torch.arange(total, device=query.device)
    block = CACHE_BLOCK_BYTES if query.device.type == "cpu" else GPU_CACHE_BLOCK_BYTES
    step = max(1, min(size, block // (4 * rows * heads * total)))
    out = torch.empty(rows, size, heads, value.shape[-1], dtype=value.dtype, device=value.device)
    for low in range(0, size, step):
        high = min(low + step, size)
        # Keys that a window hides from the whole block, and those after it, are not even multiplied.
        left = max(0, before + low - window + 1)
        right = before + high
        # The queries that share a key head follow each other, so that keys need not be repeated for them.
        queries = query[:, :, low:high].reshape(rows, groups, -1, width)
        at = slice(left, right)
        by_head = (rows, heads, high - low, -1)
        by_group = (rows, groups, -1, right - left)
        visible_tokens = places[before + low : before + high, None] + 1
        # Logits are computed with both, and chosen from: which keys are quantized differs from query to query.
        frozen = _frozen(store, "keys", visible_tokens, places[at])
        logits = (queries @ raw_keys[:, :, at].mT).view(by_head)
        if frozen is not None:
            logits = torch.where(frozen, (queries @ keys[:, :, at].mT).view(by_head), logits)
        logits = logits * scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        distance = visible_tokens - 1 - places[at]
        hidden = (distance < 0) | (distance >= window)
        logits = logits.masked_fill(hidden, -torch.inf)
        if attention_mask is not None:
            logits = _masked(logits, attention_mask[:, :, low:high, at])
        # A query of padding may see no key, and its softmax is then NaN.
        weights = logits.softmax(-1).nan_to_num().to(value.dtype)
        frozen = _frozen(store, "values", visible_tokens, places[at])
        if frozen is None:
            output = weights.view(by_group) @ store.raw_values[:, :, at]
        else:
            output = (weights * frozen).view(by_group) @ store.values[:, :, at]
            output += (weights * ~frozen).view(by_group) @ store.raw_values[:, :, at]
        out[:, low:high] = output.view(rows, heads, high - low, -1).transpose(1, 2)
    return out, None


def _masked(logits: Tensor, mask: Tensor) -> Tensor:
    """Return logits under a mask of what is seen (bool), or of what is added to them."""
    if mask.dtype == torch.bool:
        return logits.masked_fill(~mask, -torch.inf)
    return logits + mask


def _store(runs: Sequence[SchemeRun], index: int, size: int, key: Any, value: Tensor) -> QuantizedLayer:
    """Return the cache layer that a pass reads.

    It is the layer's own cache layer, one that the layer shares, or one that holds the given states alone.

    Args:
        runs: the runs of the model, the latest last.
        index: index of the layer.
        size: number of queries.
        key: the keys that the attention function is given.
        value: the values that the attention function is given.
    """
    reference = getattr(key, "cache_layer", None)
    layer: QuantizedLayer | None = reference and reference()
    if layer is not None and layer.run in runs:
        return layer
    if key.shape[-2] != size and runs[-1].plans[index].layer.keys_of == index:
        raise ValueError("these keys come from another cache: use a cache of the factory, or none")
    layer = QuantizedLayer(runs[-1].plans[index], runs[-1])
    layer.update(key, value)
    return layer


def _frozen(store: QuantizedLayer, name: str, visible_tokens: Tensor, places: Tensor) -> Tensor | None:
    """Return whether each query reads each key quantized, (queries, keys) bool; None if no key ever is.

    Args:
        store: the cache layer.
        name: ``"keys"`` or ``"values"``.
        visible_tokens: (queries, 1) number of tokens that each query sees.
        places: (keys,) places of the keys in the row.
    """
    if store.plan.sides[name].format == "none":
        return None
    return (places >= store.plan.scheme.sinks) & (places < store.plan.frozen(name, visible_tokens))


def padding_mask(**kwargs: Any) -> Tensor | None:
    """Return None unless rows are padded, since :func:`attend` itself hides later tokens and those outside a window."""
    if not kwargs.get("allow_is_causal_skip", True):
        raise ValueError(
            "quantized caches read one text per row, with causal attention: texts packed into one row are not "
            "supported, nor tokens that attend to later ones"
        )
    if kwargs.get("attention_mask") is None:
        return None
    return sdpa_mask(**{**kwargs, "allow_is_causal_skip": False})


AttentionInterface.register(ATTENTION_NAME, attend)
AttentionMaskInterface.register(ATTENTION_NAME, padding_mask)
