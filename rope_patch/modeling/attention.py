"""Attention to some of the keys at a time, by fused kernels that need no mask, and how such parts are joined.

A part is the attended values (rows, heads, queries, head_dim) and the logarithm of the sum of exponentials
(rows, heads, queries, 1), by which parts are weighted where they are joined.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

Part = tuple[Tensor, Tensor]


def attend_fused(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, *, causal: bool = False
) -> Part | None:
    """Attend by a fused kernel; None if none takes the states.

    Args:
        query: (rows, heads, queries, width) the queries.
        key: (rows, groups, keys, width) the keys, each of which several heads may share.
        value: (rows, groups, keys, head_dim) the values.
        scale: factor on the logits; by default one over the square root of the width.
        causal: whether query i sees the keys up to i, of which each belongs to one head; otherwise it sees all.
    """
    rows, heads, size, width = query.shape
    # The heads that share a key stand one after another, as more queries of it.
    queries = query.reshape(rows, key.shape[1], -1, width)
    params = SDPAParams(queries, key, value, None, 0.0, causal, False)
    if query.device.type == "cpu":
        if width != value.shape[-1]:
            return None
        out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, key, value, 0.0, causal, scale=scale
        )
    elif can_use_flash_attention(params):
        out, total, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            queries, key, value, 0.0, causal, False, scale=scale
        )
    elif can_use_efficient_attention(params):
        out, total, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            queries, key, value, None, True, 0.0, causal, scale=scale
        )
        total = total[..., : queries.shape[2]]  # the kernel pads it
    else:
        return None
    return out.reshape(rows, heads, size, -1), total.reshape(rows, heads, size, 1)


def joined(near: Part, far: Part) -> Part:
    """Return attention to the keys of two parts, each weighted by its share of the sum of exponentials."""
    # exp(far) / (exp(far) + exp(near)), which sigmoid computes without overflow.
    share = torch.sigmoid(far[1] - near[1])
    out = torch.lerp(near[0].to(share.dtype), far[0].to(share.dtype), share)
    return out, torch.logaddexp(near[1], far[1])
