"""Attention over a quantized cache in one pass, exactly as if the text had been decoded token by token.

Each query reads the keys and values in its residual window, its sinks and its unfinished block in full precision, and
all others quantized. Queries are processed in blocks. The keys that all queries of a block read in the same way, most
of a long text, are read by a fused kernel; only the keys near a block, and those at the edge of a window, differ from
query to query.
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

from rope_patch.kv_cache.blocks import at_least_float
from rope_patch.kv_cache.layer import QuantizedLayer, SchemeRun
from rope_patch.modeling.attention import Part, attend_fused, joined
from rope_patch.modeling.prefill import prefill_attention
from rope_patch.modeling.read_at_once import (
    CACHE_BLOCK_BYTES,
    MANY_QUERIES_AT_ONCE,
    QUERIES_AT_ONCE,
)
from rope_patch.modeling.temporary_modes import attending_with, attention_state

ATTENTION_NAME = "rope_patch_kv_cache"

PADDED = "quantized caches take no rows that are padded on the left: read such rows one by one, or pad on the right"


@dataclass(eq=False)
class _Attending:
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
    attending: _Attending = attention_state(model) or _Attending()
    if not attending.runs:
        attending.end.enter_context(attending_with(model, ATTENTION_NAME, attending))
    attending.runs.append(run)
    try:
        yield
    finally:
        attending.runs.remove(run)
        if not attending.runs:
            attending.end.close()


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
    attending: _Attending | None = attention_state(module)
    if attending is None:
        raise RuntimeError("attend only within rope_patch.kv_cache.quantized")
    if kwargs.get("position_bias") is not None:
        raise ValueError(f"{type(module).__name__} attends with position_bias, which quantized caches do not support")
    sinks = kwargs.get("s_aux")  # a logit of each head that has no key, as gpt-oss learns it
    rows, heads, size, width = query.shape
    index = int(module.layer_idx)  # type: ignore[arg-type]
    store = _store(attending.runs, index, size, key, value)
    run = store.run
    total = store.raw_keys.shape[-2]
    # All blocks that the last query reads quantized; for earlier queries _frozen tells which of them already are.
    store.freeze(total)
    scaling = scaling or width**-0.5
    if run.observe is not None:
        run.observe(index, query, key, value, scaling)
    window = run.plans[index].layer.window or total
    if size == total and attention_mask is not None:
        # Whether the first token of a row is hidden: blocks would begin with its padding.
        padded = _masked(query.new_zeros(()), attention_mask[..., 0, 0]).any()
        if bool(padded):
            raise ValueError(PADDED)
    fused = attention_mask is None and softcap is None
    rounded = {name: side.format != "none" for name, side in store.plan.sides.items()}
    late = any(rounded[name] and not store.plan.at_once(name) for name in rounded)
    if fused and sinks is None and window >= total and not late:
        # Every query reads what is stored, so the model's own attention serves.
        return prefill_attention(module, query, store.keys, store.values, None, scaling=scaling)
    before = total - size
    places = torch.arange(total, device=query.device)
    step = QUERIES_AT_ONCE.get(query.device.type, MANY_QUERIES_AT_ONCE)
    if not fused:
        step = max(1, min(step, CACHE_BLOCK_BYTES // (4 * rows * heads * total)))
    out = torch.empty(rows, size, heads, value.shape[-1], dtype=value.dtype, device=value.device)
    for low in range(0, size, step):
        high = min(low + step, size)
        queries = query[:, :, low:high]
        first = before + low + 1  # tokens up to the first query
        right = before + high
        # From `begin` to `end` are the keys that all queries of the block see, and read as the cache stores them.
        left = max(0, first - window)
        begin = max(0, right - window)
        end = begin
        if fused:
            stored = [store.plan.frozen(name, first) for name in rounded if rounded[name]]
            end = max(begin, min([first - 1, *stored]))  # so that each query finds its own key near it
        far = None
        if end > begin:
            far = attend_fused(queries, store.keys[:, :, begin:end], store.values[:, :, begin:end], scaling)
        if far is None:
            end = begin
        at: slice | Tensor
        if begin in (left, end):
            at = slice(end if begin == left else left, right)
        else:
            at = torch.cat((places[left:begin], places[end:right]))
        mask = None if attention_mask is None else attention_mask[:, :, low:high, at]
        part = _attend_near(store, queries, at, places[first - 1 : right, None] + 1, scaling, softcap, mask)
        if far is not None:
            part = joined(part, far)
        attended, logsum = part
        if sinks is not None:
            attended = attended * torch.sigmoid(logsum - sinks.view(1, -1, 1, 1))
        out[:, low:high] = attended.transpose(1, 2)
    return out, None


def _attend_near(
    store: QuantizedLayer,
    query: Tensor,
    at: slice | Tensor,
    visible_tokens: Tensor,
    scaling: float,
    softcap: float | None,
    mask: Tensor | None,
) -> Part:
    """Attend to keys of which each query may read others rounded, or see others.

    Args:
        store: the cache layer.
        query: (rows, heads, queries, width) the queries.
        at: the places of the keys, one after another or not.
        visible_tokens: (queries, 1) number of tokens up to each query.
        scaling: factor on the logits.
        softcap: bound of the scaled logits.
        mask: (rows, 1, queries, keys) what is seen or added to the logits, if rows are padded.
    """
    rows, heads, size, width = query.shape
    groups = store.raw_keys.shape[1]
    window = store.plan.layer.window or store.raw_keys.shape[-2]
    places = torch.arange(store.raw_keys.shape[-2], device=query.device)[at]
    # In half precision, logits of long keys (a bias of 239 in Qwen2.5) would be rounded as coarsely as a cache rounds.
    # The queries that share a key head follow each other, so that keys need not be repeated for them.
    queries = at_least_float(query).reshape(rows, groups, -1, width)
    by_head = (rows, heads, size, len(places))
    by_group = (rows, groups, -1, len(places))
    # Logits are computed with both, and chosen from: which keys are quantized differs from query to query.
    frozen = _frozen(store, "keys", visible_tokens, places)
    logits = (queries @ at_least_float(store.raw_keys[:, :, at]).mT).view(by_head)
    if frozen is not None:
        quantized = (queries @ at_least_float(store.keys[:, :, at]).mT).view(by_head)
        logits = torch.where(frozen, quantized, logits)
    logits = logits * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    distance = visible_tokens - 1 - places
    hidden = (distance < 0) | (distance >= window)
    logits = logits.masked_fill(hidden, -torch.inf)
    if mask is not None:
        logits = _masked(logits, mask)
    logsum = logits.logsumexp(-1, keepdim=True)
    # A query of padding may see no key, and its weights are then NaN.
    weights = (logits - logsum).exp().nan_to_num().to(store.raw_values.dtype)
    frozen = _frozen(store, "values", visible_tokens, places)
    if frozen is None:
        output = weights.view(by_group) @ store.raw_values[:, :, at]
    else:
        output = (weights * frozen).view(by_group) @ store.values[:, :, at]
        output += (weights * ~frozen).view(by_group) @ store.raw_values[:, :, at]
    return output.view(rows, heads, size, -1), logsum


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
