"""Pure maths of rotary frequencies: tables, wavelengths, turns, granularity, bounds.

Numbers and 1-D tensors in, numbers and 1-D tensors out; torch only, no model.

Convention, stated once for the package: a *pair* is two features that share one angle. Pairs are counted from 0,
fastest first, and ``inv_freq[i]`` is the angular step of pair ``i`` in rad/token. Hugging Face's layout puts feature
``i`` and feature ``i + rotary_dim / 2`` into pair ``i``. The order of float32 operations is Hugging Face's wherever a
formula exists there, so that tables can be compared with ``torch.equal``.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

UNROTATED = 1e-20
"""Pairs slower than this [rad/token] do not rotate: they are reported as 0, with an infinite wavelength. Even over
10**12 tokens they turn by no more than 1e-8 rad, which is below the resolution of float32."""

UNROTATED_FACTOR = 1e39
"""Divisor that stands for an unrotated pair in a longrope encoding. It overflows float32 to inf, so the loader's
``1 / (factor * base)`` is exactly 0, and unlike ``Infinity`` it is a standard JSON number."""

InvFreq = Float[Tensor, " pairs"]


def geometric(rope_theta: float, rotary_dim: int, pairs: int | None = None) -> InvFreq:
    """Return the plain RoPE table ``rope_theta ** (-2 i / rotary_dim)``, or the beginning of it.

    Args:
        rope_theta: the base of the geometric sequence, > 0.
        rotary_dim: the number of features that rotate, even.
        pairs: the number of pairs to compute, the fastest ones; all of them by default. Fewer can differ from the
            beginning of the whole table in the last bit, because the float32 power function of torch rounds differently
            in vectors of other lengths.

    Returns:
        inv_freq: (pairs,) or (rotary_dim / 2,) float32 [rad/token], fast to slow.

    Raises:
        ValueError: ``rotary_dim`` is odd or not positive, or ``rope_theta`` is not positive.

    >>> geometric(10000.0, 8).tolist()
    [1.0, 0.10000000149011612, 0.009999999776482582, 0.0010000000474974513]
    """
    check_rotary_dim(rotary_dim)
    return 1.0 / position_base(rope_theta, rotary_dim, pairs)


def position_base(rope_theta: float, rotary_dim: int, pairs: int | None = None) -> InvFreq:
    """Return ``rope_theta ** (2 i / rotary_dim)`` in the float32 arithmetic of transformers."""
    if not (math.isfinite(rope_theta) and rope_theta > 0):
        raise ValueError(f"rope_theta must be a finite number > 0, got {rope_theta}")
    # Always on the CPU, although models are built with another default device, such as meta; and integers that become
    # floats, as in transformers, so that the rounding is the same.
    end = rotary_dim if pairs is None else 2 * pairs
    exponents = torch.arange(0, end, 2, dtype=torch.int64, device="cpu").float() / rotary_dim
    return rope_theta**exponents


def check_rotary_dim(rotary_dim: int) -> None:
    """Raise ValueError unless a number of features is even and positive."""
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ValueError(f"rotary_dim must be even and positive (features rotate in pairs), got {rotary_dim}")


def table_of(values: Sequence[float]) -> InvFreq:
    """Return numbers as a table: float32 on the CPU, whatever torch's default dtype and device are.

    >>> table_of([1.0, 0.5]).dtype
    torch.float32
    """
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def is_geometric(inv_freq: InvFreq, rope_theta: float) -> bool:
    """Tell whether a table is plain RoPE of that base, up to float32 rounding (relative 1e-6).

    >>> is_geometric(geometric(1e4, 8), 1e4), is_geometric(geometric(1e4, 8) / 2, 1e4)
    (True, False)
    """
    plain = geometric(rope_theta, 2 * len(inv_freq))
    return torch.allclose(inv_freq.double(), plain.double(), rtol=1e-6, atol=0.0)


def zero_unrotated(inv_freq: InvFreq) -> InvFreq:
    """Return the table with its unrotated pairs (below 1e-20 rad/token) set to exactly 0.

    >>> zero_unrotated(torch.tensor([1.0, 1e-32])).tolist()
    [1.0, 0.0]
    """
    return inv_freq.masked_fill(unrotated(inv_freq), 0)


def unrotated(inv_freq: InvFreq) -> Bool[Tensor, " pairs"]:
    """Return the mask of the pairs that never turn.

    >>> unrotated(torch.tensor([1.0, 1e-32, 0.0])).tolist()
    [False, True, True]
    """
    return inv_freq < UNROTATED


def wavelength(inv_freq: InvFreq) -> InvFreq:
    """Return ``2 pi / inv_freq`` [tokens]; inf for unrotated pairs.

    >>> wavelength(torch.tensor([1.0, 0.0])).tolist()
    [6.2831854820251465, inf]
    """
    return 2 * math.pi / zero_unrotated(inv_freq)


def turns(inv_freq: InvFreq, context: int) -> InvFreq:
    """Return the full turns each pair makes within ``context`` tokens: ``context * inv_freq / 2 pi``.

    >>> round(turns(torch.tensor([1e-4]), 128000).item(), 2)  # Barbero et al.: the slowest pair of Llama-like bases
    2.04
    """
    return context * zero_unrotated(inv_freq) / (2 * math.pi)


def fingerprint(inv_freq: InvFreq, attention_scaling: float) -> str:
    """Return 16 hex digits that identify a table and its scaling; unrotated pairs count as 0.

    >>> fingerprint(torch.tensor([1.0, 0.0]), 1.0) == fingerprint(torch.tensor([1.0, 1e-32]), 1.0)
    True
    """
    values = zero_unrotated(inv_freq.float().cpu()).tolist()
    # Bytes in a fixed order (`<`), so that all machines give the same digits.
    return hashlib.sha256(struct.pack(f"<{len(values)}fd", *values, attention_scaling)).hexdigest()[:16]


# --- what a table implies --------------------------------------------------------------------------------------------


def granularity(inv_freq: InvFreq) -> float:
    """Return the sine similarity of the images of a query or key at consecutive positions: the mean sine of the pairs.

    It is that of vectors whose pairs are of equal norm. A larger value means that neighbouring positions are easier to
    tell apart.

    *Source*: Xiong et al., arXiv:2309.16039, appendix B, theorem 1. The paper's ``C_d`` is printed as a bare sum; it is
    the mean that converges, and the mean is what is returned.

    >>> round(granularity(geometric(10000.0, 128)), 5)
    0.10938
    """
    return float(torch.sin(inv_freq.double()).mean())


def offset_frequency_bound(context: int) -> float:
    """Return the frequency below which a pair never completes a turn in ``context``: ``2 pi / context`` [rad/token].

    *Source*: Jonasson, arXiv:2503.01832, eq. 15. Rotary offset features, and with them most rotary outliers, lie below.

    >>> int((geometric(10000.0, 128) < offset_frequency_bound(4096)).sum())  # Llama-2-7B: pairs 46 to 63
    18
    """
    if context <= 0:
        raise ValueError(f"context must be positive, got {context}")
    return 2 * math.pi / context


def offset_angle_bound(inv_freq: InvFreq, context: int) -> InvFreq:
    """Return the angle an offset feature must exceed, ``pi + context * inv_freq / 2`` [rad].

    *Source*: arXiv:2503.01832, eq. 16. ``phi`` is the angle of the mean key minus that of the mean query, in (0, 2 pi].
    Only meaningful for pairs below :func:`offset_frequency_bound`; above it the bound exceeds 2 pi, and no angle can.
    It is nan for unrotated pairs, whose logit is the same at every distance, so that ``nanmean`` leaves them out.

    >>> table = geometric(10000.0, 128)  # Llama-2-7B: 4.19 in the paper
    >>> round(float(offset_angle_bound(table, 4096)[46:].nanmean()), 2)
    4.19
    """
    bound = math.pi + context * inv_freq / 2
    return bound.masked_fill(unrotated(inv_freq), math.nan)
