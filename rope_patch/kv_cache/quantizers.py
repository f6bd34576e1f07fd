"""Rounding of one block of keys or values to a format and back: what a quantized cache would return.

Nothing is packed: a value comes back as the number that the format can hold, in the data type of the states. Scales and
zero points are float32, also under states in half precision (float64 under float64), where packed caches store 16 bits.
"""

from __future__ import annotations

import functools

import torch
from scipy.linalg import hadamard
from torch import Tensor

from rope_patch.kv_cache.schemes import FORMATS, Side

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Levels of NF4 (Dettmers et al., arXiv:2305.14314, appendix E)."""


def fake_quantize(x: Tensor, side: Side) -> Tensor:
    """Return a block as its format can hold it; same shape and data type.

    Args:
        x: (rows, heads, tokens, features) one block of tokens. Rows never share a scale.
        side: format, axis and group; its other switches are the caller's business.

    Raises:
        ValueError: NaN or infinite states.
    """
    if side.format == "none" or x.numel() == 0:
        return x
    if not bool(torch.isfinite(x).all()):
        raise ValueError(f"states to be quantized must be finite, got {x[~torch.isfinite(x)][0].item()}")
    work = at_least_float(x)
    if side.axis == "channel":
        out = _round(work, side, (-2,))
    else:
        size = side.group or x.shape[-1]
        whole = x.shape[-1] // size * size
        parts = [_round(_split(work[..., :whole], size), side, (-1,)).flatten(-2)] if whole else []
        if whole < x.shape[-1]:
            parts.append(_round(work[..., whole:], side, (-1,)))
        out = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
    return out.to(x.dtype)


def at_least_float(x: Tensor) -> Tensor:
    """Return states in float32 if they are in half precision."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _round(x: Tensor, side: Side, dims: tuple[int, ...]) -> Tensor:
    """Round values that share a scale over some dimensions."""
    bits = FORMATS[side.format]
    if side.format.startswith("int") and not side.symmetric:
        low, high = x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)
        scale = (high - low) / (2**bits - 1)
        steps: Tensor = ((x - low) / _safe(scale)).round_().clamp_(0, 2**bits - 1)
        return steps.mul_(scale).add_(low)
    largest = x.abs().amax(dims, keepdim=True)
    if side.format.startswith("int"):
        top = 2 ** (bits - 1) - 1
        scale = largest / top
        whole: Tensor = (x / _safe(scale)).round_().clamp_(-top, top)
        return whole.mul_(scale)
    if side.format == "nf4":
        levels = torch.tensor(NF4, dtype=x.dtype, device=x.device)
        between = (levels[1:] + levels[:-1]) / 2
        return levels[torch.bucketize((x / _safe(largest)).contiguous(), between)] * largest
    top = torch.finfo(torch.float8_e4m3fn).max
    if side.axis == "tensor":
        return x.clamp(-top, top).to(torch.float8_e4m3fn).to(x.dtype)
    scale = largest / top
    return (x / _safe(scale)).to(torch.float8_e4m3fn).to(x.dtype) * scale


def _safe(scale: Tensor) -> Tensor:
    return scale.masked_fill(scale == 0, 1.0)


def mix(x: Tensor) -> Tensor:
    """Return features (..., features) rotated by a Hadamard matrix; its own inverse.

    Widths that are not a power of two are divided into equal parts that are.
    """
    width = x.shape[-1] & -x.shape[-1]
    matrix = _hadamard(width).to(x.device, x.dtype)
    return (_split(x, width) @ matrix).flatten(-2)


def _split(x: Tensor, size: int) -> Tensor:
    """Return features (..., features) in parts of equal size: (..., parts, size)."""
    return x.reshape(*x.shape[:-1], -1, size)


@functools.lru_cache(maxsize=8)
def _hadamard(width: int) -> Tensor:
    matrix: Tensor = torch.from_numpy(hadamard(width)).double() / width**0.5
    return matrix
