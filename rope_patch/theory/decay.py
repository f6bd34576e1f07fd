"""How an activation depends on distance: all-ones, Gaussian and random-position queries and keys.

*Source*: Barbero et al., arXiv:2410.06205, proposition 3.2 and figures 2, 8, 9: an activation decays with distance when
query and key are one constant vector, and does not when they are independent.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rope_patch.frequencies import Table, zero_unrotated

BLOCK = 1 << 21
"""Numbers of one intermediate tensor: 16 MiB in float64, whatever the number of positions."""

Features = Float[Tensor, " features"]
Distances = Int[Tensor, " distances"] | Float[Tensor, " distances"]
Curve = Float[Tensor, " distances"]


def activation(
    inv_freq: Table, distances: Distances, query: Features | None = None, key: Features | None = None
) -> Curve:
    """Return the activation ``query^T R^-distance key`` at each distance.

    Pair by pair it is ``|query| |key| cos(angle(key) - angle(query) - inv_freq distance)``. For the all-ones query and
    key, which stand for None, it is ``2 sum cos(inv_freq distance)``: Barbero et al.'s figure 2 on the left.

    *Source*: Barbero et al., figure 2; not divided by ``sqrt(head_dim)``.

    Args:
        inv_freq: (pairs,) [rad/token].
        distances: (distances,) the query's position minus the key's [tokens]; may be negative or broken.
        query: (2 pairs,) in Hugging Face's half-split layout, or None for all ones.
        key: (2 pairs,), or None for all ones.

    Returns:
        (distances,) float64.

    Raises:
        ValueError: a query or key that does not hold two features per pair.

    >>> activation(torch.tensor([1.0, 0.1]), torch.tensor([0, 10])).round(decimals=3).tolist()  # 2 cos 10 + 2 cos 1
    [4.0, -0.598]
    """
    steps = zero_unrotated(inv_freq.double())
    product = as_complex(query, len(steps)).conj() * as_complex(key, len(steps))
    weights = torch.cat([product.real, product.imag])
    parts = []
    for part in torch.split(distances.double(), max(1, BLOCK // (2 * len(steps)))):
        angles = part[:, None] * steps
        parts.append(torch.cat([angles.cos(), angles.sin()], dim=1) @ weights)
    return torch.cat(parts) if parts else distances.double()


def activation_curve(inv_freq: Table, length: int, query: Features | None = None, key: Features | None = None) -> Curve:
    """Return :func:`activation` at the distances 0, 1, … ``length - 1``, some twenty times as fast.

    Every distance is a multiple of 1024 and a rest; the rests are the same for all multiples, so by the sum formulas
    the curve is one product of matrices. Equal to :func:`activation` to 1e-12 of ``|query| |key|``.

    Args:
        inv_freq: (pairs,) [rad/token].
        length: number of distances [tokens].
        query: (2 pairs,), or None for all ones.
        key: (2 pairs,), or None for all ones.

    >>> table = torch.tensor([1.0, 0.1])
    >>> torch.allclose(activation_curve(table, 3000), activation(table, torch.arange(3000)))
    True
    """
    steps = zero_unrotated(inv_freq.double())
    product = as_complex(query, len(steps)).conj() * as_complex(key, len(steps))
    starts = torch.arange(0, length, 1024, dtype=torch.float64)[:, None] * steps
    turned = product * torch.polar(torch.ones_like(starts), -starts)
    rests = torch.arange(min(length, 1024), dtype=torch.float64)[:, None] * steps
    waves = torch.cat([rests.cos(), rests.sin()], dim=1)
    return (torch.cat([turned.real, turned.imag], dim=1) @ waves.T).flatten()[:length]


def gaussian_moments(inv_freq: Table, distances: Distances, *, shared: bool = False) -> tuple[Curve, Curve]:
    """Return mean and standard deviation of the activation of standard normal queries and keys, exactly.

    Independent query and key: the mean is 0 at every distance (proposition 3.2: no decay, since there is nothing to
    decay from) and the variance ``2 pairs``. One vector as both: the mean is the all-ones curve, the variance
    ``4 sum cos(inv_freq distance)^2``, since the squared norm of a pair is chi-squared with two degrees of freedom.

    *Source*: Barbero et al. proposition 3.2 for the mean; the variances are ours.

    Args:
        inv_freq: (pairs,) [rad/token].
        distances: (distances,) [tokens].
        shared: query and key are the same vector.

    >>> gaussian_moments(torch.tensor([1.0, 0.1]), torch.tensor([0, 10]))
    (tensor([0., 0.], dtype=torch.float64), tensor([2., 2.], dtype=torch.float64))
    """
    pairs = len(inv_freq)
    if not shared:
        zeros = torch.zeros(len(distances), dtype=torch.float64, device=distances.device)
        return zeros, zeros + (2 * pairs) ** 0.5
    # 4 cos^2 a = 2 + 2 cos 2a: the all-ones curve at twice the distance
    variance = 2 * pairs + activation(inv_freq, 2 * distances)
    return activation(inv_freq, distances), variance.clamp(min=0).sqrt()


def gaussian_activation(
    inv_freq: Table, distances: Distances, *, samples: int = 1, seed: int = 0, repeated: bool = False
) -> Float[Tensor, "samples distances"]:
    """Return sampled activations of independent standard normal queries and keys.

    With a fresh pair of vectors at every distance the values jump about zero; with one pair repeated along the sequence
    they are a smooth curve, which starts anywhere and need not decay (Barbero et al. figures 2, 8, 9).

    Args:
        inv_freq: (pairs,) [rad/token].
        distances: (distances,) [tokens].
        samples: independent curves.
        seed: of the vectors.
        repeated: one query and one key per curve, instead of fresh ones at every distance.

    Returns:
        (samples, distances) float64; each value has the moments of :func:`gaussian_moments`.

    >>> gaussian_activation(torch.tensor([1.0, 0.1]), torch.arange(5), samples=3).shape
    torch.Size([3, 5])
    """
    generator = torch.Generator().manual_seed(seed)
    size = 2 * len(inv_freq)

    def draw(count: int) -> Tensor:
        return torch.randn(count, size, generator=generator, dtype=torch.float64)

    curves = []
    for _ in range(samples):
        if repeated:
            query, key = draw(2)
            curves.append(activation(inv_freq, distances, query, key))
            continue
        parts = []
        for part in torch.split(distances, max(1, BLOCK // size)):
            turned = zero_unrotated(inv_freq.double()) * part.double()[:, None]
            query, key = (as_complex(draw(len(part)), len(inv_freq)) for _ in range(2))
            parts.append((query.conj() * key * torch.polar(torch.ones_like(turned), -turned)).real.sum(1))
        curves.append(torch.cat(parts))
    return torch.stack(curves)


def randpos_activation(
    inv_freq: Table,
    distances: Int[Tensor, " distances"],
    *,
    tokens: int,
    limit: int,
    query: Features | None = None,
    key: Features | None = None,
) -> Curve:
    """Return the mean activation when positions are a sorted random sample, exactly.

    RandPos(limit) gives a sequence of ``tokens`` positions drawn from ``0 … limit - 1`` without replacement and sorted.
    Two tokens ``r`` apart in the sequence are then ``t`` apart in position with probability
    ``C(t - 1, r - 1) C(limit - t, tokens - r) / C(limit, tokens)``, and the mean is taken over that: no sampling.

    *Source*: Ruoss et al., arXiv:2305.16843; Barbero et al.'s figures for the curve. The probability is ours.

    Args:
        inv_freq: (pairs,) [rad/token].
        distances: (distances,) apart in the sequence, 0 to ``tokens - 1`` [tokens].
        tokens: of a sequence.
        limit: positions to draw from, at least ``tokens``.
        query: (2 pairs,), or None for all ones.
        key: (2 pairs,), or None for all ones.

    Raises:
        ValueError: fewer positions than tokens, or a distance outside the sequence.

    >>> table = torch.tensor([1.0])
    >>> randpos_activation(table, torch.tensor([1]), tokens=4, limit=4)  # no choice: 2 cos 1
    tensor([1.0806], dtype=torch.float64)
    """
    if not 1 <= tokens <= limit:
        raise ValueError(f"limit must be at least the number of tokens, got limit {limit} and tokens {tokens}")
    if len(distances) and (int(distances.min()) < 0 or int(distances.max()) >= tokens):
        raise ValueError(f"distances must lie within the sequence, from 0 to {tokens - 1}")
    curve = activation_curve(inv_freq, limit, query, key)
    factorials = torch.lgamma(torch.arange(1, limit + 1, dtype=torch.float64))  # ln 0!, ln 1!, …
    spare = limit - tokens
    means = [curve[0]] * len(distances)
    for i, apart in enumerate(distances.tolist()):
        if apart:  # gaps run from apart to apart + spare
            before = factorials[apart - 1 : apart + spare] - factorials[: spare + 1]  # ln C(gap - 1, apart - 1) + const
            after = factorials[tokens - apart : limit - apart + 1] - factorials[: spare + 1]
            # Normalised by their own sum, which drops the constants and what rounding they share.
            means[i] = torch.softmax(before + after.flip(0), dim=0) @ curve[apart : apart + spare + 1]
    return torch.stack(means) if means else torch.zeros(0, dtype=torch.float64)


def as_complex(x: Tensor | None, pairs: int) -> Tensor:
    """Return features of the half-split layout as complex numbers, one per pair; all ones for None."""
    if x is None:
        x = torch.ones(2 * pairs, dtype=torch.float64)
    if x.shape[-1] != 2 * pairs:
        raise ValueError(f"a query or key must hold 2 features per pair: expected {2 * pairs}, got {x.shape[-1]}")
    return torch.complex(x[..., :pairs].double(), x[..., pairs:].double())
