"""Read a long text in chunks, with memory that does not grow beyond the cache.

For each chunk that is read through a cache, transformers itself makes a mask of chunk × context, the same mask again
in floating point, repeated keys and values for grouped heads, and new copies of the layer's cache. None of these is
needed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rope_patch.modeling.attention import attend_fused, joined

ATTENTION_NAME = "rope_patch_prefill"


class RoomyLayer(DynamicLayer):
    """A cache layer whose memory is allocated once, for a known number of tokens.

    Args:
        capacity: number of tokens for which there is room.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.capacity = capacity

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add the states of new tokens, and return those of all tokens so far."""
        start = self.get_seq_length()
        stop = start + key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.stored = [s.new_empty(*s.shape[:-2], self.capacity, s.shape[-1]) for s in (key_states, value_states)]
        # transformers reads the attributes `keys` and `values`: they are views, so nothing is copied.
        for store, states in zip(self.stored, (key_states, value_states), strict=True):
            store[..., start:stop, :] = states
        self.keys, self.values = (store[..., :stop, :] for store in self.stored)
        return self.keys, self.values


def prefill_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend as ``sdpa`` does, but without a whole mask for a chunk that follows a context.

    Flash attention on a GPU needs no mask. On a CPU the chunk attends to the context and to itself separately. What
    neither can do, such as float32 on a GPU, attends with a mask.
    """
    heads, size, width = query.shape[1:]
    before = key.shape[2] - size
    special = any(kwargs.get(name) is not None for name in ("position_bias", "softcap", "cache"))
    causal = kwargs.get("is_causal", getattr(module, "is_causal", True)) is not False
    special = special or not causal or bool(kwargs.get("dropout"))
    # Anything but a plain causal chunk is left to transformers.
    if attention_mask is not None or size == 1 or before == 0 or special:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    shared = heads // key.shape[1]
    if can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, shared > 1)):
        bias = causal_lower_right(size, before + size)
        attended = nn.functional.scaled_dot_product_attention(
            query, key, value, bias, scale=kwargs.get("scaling"), enable_gqa=shared > 1
        )
        return attended.transpose(1, 2), None
    if query.device.type == "cpu" and width == value.shape[-1] and not query.requires_grad:
        return _in_two_parts(query, key, value, before, kwargs.get("scaling")).transpose(1, 2), None
    mask = torch.ones(size, before + size, dtype=torch.bool, device=query.device).tril(before)
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


def _in_two_parts(query: Tensor, key: Tensor, value: Tensor, before: int, scale: float | None) -> Tensor:
    """Attend separately to the tokens before a chunk, all of which every query sees, and to the chunk; join the parts.

    No mask is needed, and all queries go to the kernel at once; blocks with a mask take 1.5 times as long on a CPU.

    Args:
        query: (batch, heads, chunk, width) queries of the chunk.
        key: (batch, groups, tokens, width) keys of all tokens.
        value: (batch, groups, tokens, width) values of all tokens.
        before: number of tokens before the chunk.
        scale: factor on the logits; by default one over the square root of the width.

    Returns:
        Attended values (batch, heads, chunk, width).
    """
    shared = query.shape[1] // key.shape[1]
    own_key, own_value = (states[:, :, before:].repeat_interleave(shared, 1) for states in (key, value))
    near = attend_fused(query, own_key, own_value, scale, causal=True)
    far = attend_fused(query, key[:, :, :before], value[:, :, :before], scale)
    assert near is not None and far is not None  # the kernel for CPUs takes all that the caller lets pass
    return joined(near, far)[0].to(query.dtype)


def prefill_mask(**kwargs: Any) -> Tensor | None:
    """Return None if attention is plainly causal; otherwise the mask of ``sdpa``.

    Sliding windows, padding and caches of a fixed size need a mask.
    """
    plain = (
        kwargs.get("allow_is_causal_skip", True)
        and kwargs.get("attention_mask") is None
        and kwargs.get("local_size") is None
        and kwargs.get("kv_offset", 0) == 0
        and kwargs.get("q_offset", 0) + kwargs["q_length"] == kwargs["kv_length"]
    )
    return None if plain else sdpa_mask(**kwargs)


AttentionInterface.register(ATTENTION_NAME, prefill_attention)
AttentionMaskInterface.register(ATTENTION_NAME, prefill_mask)
