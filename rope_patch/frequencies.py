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

Table = Float[Tensor, " pairs"]


def geometric(rope_theta: float, rotary_dim: int, pairs: int | None = None) -> Table:
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
    _check_rotary_dim(rotary_dim)
    return 1.0 / _position_base(rope_theta, rotary_dim, pairs)


def _position_base(rope_theta: float, rotary_dim: int, pairs: int | None = None) -> Table:
    """``rope_theta ** (2 i / rotary_dim)`` in the float32 arithmetic of transformers."""
    if not (math.isfinite(rope_theta) and rope_theta > 0):
        raise ValueError(f"rope_theta must be a finite number > 0, got {rope_theta}")
    # Always on the CPU, although models are built with another default device, such as meta; and integers that become
    # floats, as in transformers, so that the rounding is the same.
    end = rotary_dim if pairs is None else 2 * pairs
    exponents = torch.arange(0, end, 2, dtype=torch.int64, device="cpu").float() / rotary_dim
    return rope_theta**exponents


def _check_rotary_dim(rotary_dim: int) -> None:
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ValueError(f"rotary_dim must be even and positive (features rotate in pairs), got {rotary_dim}")


def table_of(values: Sequence[float]) -> Table:
    """Return numbers as a table: float32 on the CPU, whatever torch's default dtype and device are.

    >>> table_of([1.0, 0.5]).dtype
    torch.float32
    """
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def is_geometric(inv_freq: Table, rope_theta: float) -> bool:
    """Tell whether a table is plain RoPE of that base, up to float32 rounding (relative 1e-6).

    >>> is_geometric(geometric(1e4, 8), 1e4), is_geometric(geometric(1e4, 8) / 2, 1e4)
    (True, False)
    """
    plain = geometric(rope_theta, 2 * len(inv_freq))
    return torch.allclose(inv_freq.double(), plain.double(), rtol=1e-6, atol=0.0)


def zero_unrotated(inv_freq: Table) -> Table:
    """Return the table with its unrotated pairs (below 1e-20 rad/token) set to exactly 0.

    >>> zero_unrotated(torch.tensor([1.0, 1e-32])).tolist()
    [1.0, 0.0]
    """
    return inv_freq.masked_fill(unrotated(inv_freq), 0)


def unrotated(inv_freq: Table) -> Bool[Tensor, " pairs"]:
    """Return the mask of the pairs that never turn.

    >>> unrotated(torch.tensor([1.0, 1e-32, 0.0])).tolist()
    [False, True, True]
    """
    return inv_freq < UNROTATED


def wavelength(inv_freq: Table) -> Table:
    """Return ``2 pi / inv_freq`` [tokens]; inf for unrotated pairs.

    >>> wavelength(torch.tensor([1.0, 0.0])).tolist()
    [6.2831854820251465, inf]
    """
    return 2 * math.pi / zero_unrotated(inv_freq)


def turns(inv_freq: Table, context: int) -> Table:
    """Return the full turns each pair makes within ``context`` tokens: ``context * inv_freq / 2 pi``.

    >>> round(turns(torch.tensor([1e-4]), 128000).item(), 2)  # Barbero et al.: the slowest pair of Llama-like bases
    2.04
    """
    return context * zero_unrotated(inv_freq) / (2 * math.pi)


# --- tables of the methods -------------------------------------------------------------------------------------------


def ntk_theta(rope_theta: float, factor: float, rotary_dim: int) -> float:
    """Return the base of static NTK-aware scaling, ``rope_theta * factor ** (d / (d - 2))``.

    The slowest pair is then slowed by exactly ``factor`` and the fastest not at all. This is the base that
    transformers' ``dynamic`` type reaches at a fixed length.

    Raises:
        ValueError: ``rotary_dim`` is below 4, for which the exponent is undefined.

    >>> round(ntk_theta(10000.0, 4.0, 128))
    40890
    """
    if rotary_dim < 4:
        raise ValueError(f"NTK scaling needs rotary_dim >= 4, got {rotary_dim}")
    return rope_theta * math.pow(factor, rotary_dim / (rotary_dim - 2))


def yarn_scaling(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """Return YaRN's attention factor, on cos and sin: ``0.1 ln(factor) + 1``, and 1 for factors up to 1.

    With both ``mscale`` arguments it is the ratio of the two scaled forms (DeepSeek). *Source*: YaRN,
    arXiv:2309.00071, eq. 22, as transformers computes it.

    >>> round(yarn_scaling(4.0), 4), yarn_scaling(0.5)
    (1.1386, 1.0)
    """
    if factor <= 1:
        return 1.0
    log = math.log(factor)
    if mscale and mscale_all_dim:
        return (0.1 * mscale * log + 1.0) / (0.1 * mscale_all_dim * log + 1.0)
    return 0.1 * log + 1.0


def yarn(
    rope_theta: float,
    rotary_dim: int,
    *,
    factor: float,
    context: int,
    beta_fast: float = 32,
    beta_slow: float = 1,
    truncate: bool = True,
) -> Table:
    """Return YaRN's NTK-by-parts table.

    Pairs that turn more than ``beta_fast`` times within ``context`` keep their frequency, pairs that turn less than
    ``beta_slow`` times are divided by ``factor``, and a ramp joins the two. *Source*: YaRN, arXiv:2309.00071, sec. 3.2.
    The ramp is transformers', linear in the pair *index*, where the paper's is linear in turns: in the middle the two
    tables differ by up to 1.9 times at factor 4, and more at larger factors.

    Args:
        rope_theta: the base of the unscaled table.
        rotary_dim: the number of features that rotate, even.
        factor: the factor by which the context is extended.
        context: the context that the model was trained with [tokens].
        beta_fast: the number of turns within the context above which a pair keeps its frequency.
        beta_slow: the number of turns within the context below which a pair is divided by ``factor``.
        truncate: whether the ends of the ramp are rounded outwards to whole pairs.
    """
    _check_rotary_dim(rotary_dim)
    low, high = _ramp(rope_theta, rotary_dim, context, beta_fast, beta_slow, truncate)
    # As in transformers: a ramp without width would divide by 0.
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low), 0, 1)
    base = _position_base(rope_theta, rotary_dim)
    # 1 - share is not written as ramp, which differs in the last bit: this is transformers' order of operations.
    share = 1 - ramp
    return 1.0 / (factor * base) * (1 - share) + 1.0 / base * share


def _ramp(
    rope_theta: float, rotary_dim: int, context: int, beta_fast: float, beta_slow: float, truncate: bool = True
) -> tuple[float, float]:
    """Return the pairs that turn ``beta_fast`` and ``beta_slow`` times in a context; ``truncate`` rounds outwards."""

    def pair_turning(rotations: float) -> float:
        # The i for which context * rope_theta ** (-2 i / rotary_dim) is 2 pi * rotations.
        return (rotary_dim * math.log(context / (rotations * 2 * math.pi))) / (2 * math.log(rope_theta))

    low, high = pair_turning(beta_fast), pair_turning(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    # Transformers bounds the index of a pair by the number of features, which is twice as many; so do we, to equal it.
    return max(low, 0), min(high, rotary_dim - 1)


def mrrope(
    rope_theta: float, rotary_dim: int, *, factor: float, context: int, beta_fast: float = 32, beta_slow: float = 1
) -> Table:
    """Return MrRoPE-Pro's table: YaRN's ends, and between them a divisor whose logarithm grows quadratically.

    With YaRN's rounded ends ``low`` and ``high``, ``n = high - low`` and ``t = i - low``, pair ``i`` is divided by
    ``factor ** (t (t + 1) / (n (n + 1)))`` between the ends, by 1 up to ``low`` and by ``factor`` from ``high`` on.
    *Source*: arXiv:2601.22181, eq. 14 to 16, with the rounding and the bounds of the authors' code
    (github.com/mattian7/mrRoPE at d1a6f31).

    The arguments are those of :func:`yarn`.
    """
    plain = geometric(rope_theta, rotary_dim)
    low, high = _ramp(rope_theta, rotary_dim, context, beta_fast, beta_slow)
    n = high - low

    def divisor(i: int) -> float:
        t = i - low
        if t <= 0:
            return 1.0
        if t >= n:
            return factor
        grown: float = factor ** (t * (t + 1) / (n * (n + 1)))
        return grown

    return plain / table_of([divisor(i) for i in range(len(plain))])


def llama3(inv_freq: Table, *, factor: float, low_freq_factor: float, high_freq_factor: float, context: int) -> Table:
    """Return Llama 3.1's smoothing of a table.

    Wavelengths above ``context / low_freq_factor`` are stretched by ``factor``, those below
    ``context / high_freq_factor`` kept, those between interpolated. *Source*: transformers' ``llama3`` rope type.
    """
    slow_from, fast_to = context / low_freq_factor, context / high_freq_factor
    length = 2 * math.pi / inv_freq
    table = torch.where(length > slow_from, inv_freq / factor, inv_freq)
    smooth = (context / length - low_freq_factor) / (high_freq_factor - low_freq_factor)
    # Written operation by operation as in transformers, so that the tables are equal to the last bit.
    between = ~(length < fast_to) * ~(length > slow_from)
    return torch.where(between, (1 - smooth) * table / factor + smooth * table, table)


def longrope(rope_theta: float, factors: Sequence[float]) -> Table:
    """Return the table transformers builds from longrope ``factors``, ``1 / (factors * rope_theta ** (2 i / d))``.

    >>> longrope(10000.0, [1.0, 2.0, 1e39]).tolist()
    [1.0, 0.02320794202387333, 0.0]
    """
    return 1.0 / (table_of(factors) * _position_base(rope_theta, 2 * len(factors)))


def longrope_factors(inv_freq: Table, rope_theta: float) -> list[float]:
    """Return factors from which transformers rebuilds the table, to the last bit where float32 allows it.

    A naive quotient is off by one unit in the last place for some pairs. So the float32 neighbours of the quotient are
    searched for one that :func:`longrope` turns into the wanted frequency; where none does, the nearest is taken and
    the rebuilt table is the canonical one. Canonicalising a canonical table changes nothing.
    """
    base = _position_base(rope_theta, 2 * len(inv_freq))
    target = zero_unrotated(inv_freq.float().cpu())
    # In float64, so that only the last step rounds.
    guess = (1.0 / (target.double() * base.double())).float()
    # The bits of a positive number, read as a whole number, are one less and one more than those of its neighbours.
    steps = torch.tensor([[0], [1], [-1], [2], [-2]], dtype=torch.int32, device="cpu")
    factors = (guess.view(torch.int32) + steps).view(torch.float32)
    miss = (1.0 / (factors * base) - target).abs().double()
    best = factors[miss.argmin(dim=0), torch.arange(len(target), device="cpu")]
    # In float64, since the divisor of an unrotated pair is no float32.
    numbers: list[float] = best.double().masked_fill(unrotated(target), UNROTATED_FACTOR).tolist()
    return numbers


def fingerprint(inv_freq: Table, attention_scaling: float) -> str:
    """Return 16 hex digits that identify a table and its scaling; unrotated pairs count as 0.

    >>> fingerprint(torch.tensor([1.0, 0.0]), 1.0) == fingerprint(torch.tensor([1.0, 1e-32]), 1.0)
    True
    """
    values = zero_unrotated(inv_freq.float().cpu()).tolist()
    # Bytes in a fixed order (`<`), so that all machines give the same digits.
    return hashlib.sha256(struct.pack(f"<{len(values)}fd", *values, attention_scaling)).hexdigest()[:16]


# --- what a table implies --------------------------------------------------------------------------------------------


def granularity(inv_freq: Table) -> float:
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


def offset_angle_bound(inv_freq: Table, context: int) -> Table:
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
