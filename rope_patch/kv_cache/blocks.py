"""Round a block of keys or values to a format and back, by axis and group; the arithmetic of each is in `formats`."""

from __future__ import annotations

import functools

import torch
from scipy.linalg import hadamard
from torch import Tensor

from rope_patch.kv_cache.formats import FORMATS, in_parts
from rope_patch.kv_cache.schemes import Scheme, Side
from rope_patch.modeling.inputs import tensor_hash
from rope_patch.registry import is_built_in


def fake_quantize(x: Tensor, side: Side) -> Tensor:
    """Return a block rounded to the numbers that its format can hold, in the same shape and data type.

    Args:
        x: (rows, heads, tokens, features) one block of tokens. Rows never share a scale.
        side: how the block is quantized, but for the rotation, which the caller undoes.

    NaN or infinite states are not looked for, since a GPU would be waited for: they become NaN, as all states do that
    share their scale, and so do losses, which are checked. A format without a scale clips them, as an engine does.
    """
    if side.format == "none" or x.numel() == 0:
        return x
    form = FORMATS[side.format]
    work = x if form.takes_half else at_least_float(x)
    rotated = side.hadamard and x.shape[-1] % form.rotated == 0
    if rotated:
        work = mix(work, side.hadamard)
    if side.axis == "channel":
        out = _round(work, side, -2)
    elif not 0 < side.features < x.shape[-1]:
        out = _round(work, side, -1)
    else:
        size = side.features
        whole = x.shape[-1] // size * size
        parts = [_round(in_parts(work[..., :whole], size), side, -1).flatten(-2)]
        if whole < x.shape[-1]:  # the last group is short
            parts.append(_round(work[..., whole:], side, -1))
        out = torch.cat(parts, -1)
    if rotated:
        out = mix(out, side.hadamard)
    return out.to(x.dtype)


def scheme_identity(scheme: Scheme) -> str:
    """Return the text by which keys of stored results tell schemes apart.

    The code of a format of the user's own may change under its name, in a file, a notebook or what it reads at run
    time: such a format is asked to round fixed numbers, from 2^-8 to 2^8 in size, as its side rounds states.
    """
    parts = [str(scheme)]
    for side in (*scheme.key.parts, *scheme.value.parts):
        if not is_built_in(FORMATS[side.format]):
            shape = (1, 2, max(side.block, 64), 128)
            states = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            states *= torch.linspace(-8, 8, shape[2])[:, None].exp2()
            parts.append(f"{side.block} {tensor_hash(fake_quantize(states, side))}")
    return " ".join(parts)


def _round(x: Tensor, side: Side, dim: int) -> Tensor:
    """Round numbers to the format of a side; those along a dimension share a scale."""
    out = FORMATS[side.format].round(x.clone(), dim)  # a format of the user's own may work in place
    if out.shape != x.shape:
        raise ValueError(
            f"the format {side.format!r} must return the shape that it is given: {tuple(x.shape)} came back as "
            f"{tuple(out.shape)}"
        )
    return out


def at_least_float(x: Tensor) -> Tensor:
    """Return states in float32 if they are in half precision, and unchanged otherwise."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def mix(x: Tensor, size: int = 1) -> Tensor:
    """Return features (..., features) rotated by a Hadamard matrix; a second rotation undoes the first.

    Args:
        x: the features.
        size: number of features that are rotated together, a power of two; features of which it is no divisor stay as
            they are. 1 stands for the largest power of two that divides the number of features.
    """
    # The largest power of two that divides the number of features, by its lowest bit.
    width = x.shape[-1] & -x.shape[-1] if size == 1 else size
    if x.shape[-1] % width:
        return x
    return (in_parts(x, width) @ _hadamard(width, x.dtype, x.device)).flatten(-2)


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)  # a matrix that is made in inference mode could not be used with gradients later
def _hadamard(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    matrix: Tensor = torch.from_numpy(hadamard(width)).double() / width**0.5
    return matrix.to(dtype).to(device)
