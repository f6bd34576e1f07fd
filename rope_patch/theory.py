"""What a rotary table implies, without a model: decay, heads built by hand, distances between images.

Numbers and tensors in, numbers and float64 tensors out. Everything is exact where it can be, and linear in the number
of positions unless it says otherwise, so a million positions take seconds.

*Sources*: Barbero et al., arXiv:2410.06205 · Xiong et al., arXiv:2309.16039, appendix B · Wendler, *Notes on rotary
positional embeddings*, 2025 · Jonasson, arXiv:2503.01832, whose bounds are in :mod:`rope_patch.frequencies`.

Conventions are :mod:`rope_patch.frequencies`'s. A *distance* is the query's position minus the key's, >= 0 in a causal
model, and an *activation* is ``query^T R^-distance key``: the logit before it is divided by ``sqrt(head_dim)``.
Queries and keys have Hugging Face's half-split layout, (2 pairs,); None stands for all ones. The *image* of a unit
vector is what rotation makes of it at a position; an attention scaling is divided out.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rope_patch.frequencies import Table, zero_unrotated

VALUES_AT_ONCE = 1 << 21
"""Number of elements of one intermediate tensor: 16 MiB in float64, whatever the number of positions."""

Features = Float[Tensor, " features"]
Distances = Int[Tensor, " distances"] | Float[Tensor, " distances"]
Curve = Float[Tensor, " distances"]


# --- decay -----------------------------------------------------------------------------------------------------------


def activation(
    inv_freq: Table, distances: Distances, query: Features | None = None, key: Features | None = None
) -> Curve:
    """Return the activation ``query^T R^-distance key`` at each distance.

    For the all-ones query and key it is ``2 sum cos(inv_freq distance)``.

    *Source*: Barbero et al., figure 2; not divided by ``sqrt(head_dim)``.

    Args:
        inv_freq: (pairs,) the table [rad/token].
        distances: (distances,) the distances between query and key, which may be negative or fractions [tokens].
        query: (2 pairs,) the query before rotation, or None for all ones.
        key: (2 pairs,) the key before rotation, or None for all ones.

    Raises:
        ValueError: a query or key that does not hold two features for each pair.

    >>> activation(torch.tensor([1.0, 0.1]), torch.tensor([0, 10])).round(decimals=3).tolist()  # 2 cos 10 + 2 cos 1
    [4.0, -0.598]
    """
    steps = zero_unrotated(inv_freq.double())
    # As complex numbers, the activation is the real part of sum conj(query) key exp(-i angle): a product with
    # cosines and one with sines.
    product = _complex(query, len(steps)).conj() * _complex(key, len(steps))
    weights = torch.cat([product.real, product.imag])
    parts = [distances.new_zeros(0, dtype=torch.float64)]
    for part in torch.split(distances.double(), max(1, VALUES_AT_ONCE // (2 * len(steps)))):
        angles = part[:, None] * steps
        parts.append(torch.cat([angles.cos(), angles.sin()], dim=1) @ weights)
    return torch.cat(parts)


def activation_curve(inv_freq: Table, length: int, query: Features | None = None, key: Features | None = None) -> Curve:
    """Return :func:`activation` at the distances 0, 1, … ``length - 1``, some twenty times as fast.

    Every distance is a multiple of 1024 and a rest; the rests are the same for all multiples, so by the sum formulas
    the curve is one product of matrices. Equal to :func:`activation` to 1e-12 of ``|query| |key|``.

    Args:
        inv_freq: (pairs,) the table [rad/token].
        length: the number of distances, from 0 on [tokens].
        query: (2 pairs,) the query before rotation, or None for all ones.
        key: (2 pairs,) the key before rotation, or None for all ones.
    """
    steps = zero_unrotated(inv_freq.double())
    product = _complex(query, len(steps)).conj() * _complex(key, len(steps))
    # Every distance is a start and a rest: exp(-i start) and exp(-i rest) are computed once each, and multiplied.
    starts = torch.arange(0, length, 1024, dtype=torch.float64)[:, None] * steps
    turned = product * torch.polar(torch.ones_like(starts), -starts)
    rests = torch.arange(min(length, 1024), dtype=torch.float64)[:, None] * steps
    waves = torch.cat([rests.cos(), rests.sin()], dim=1)
    return (torch.cat([turned.real, turned.imag], dim=1) @ waves.T).flatten()[:length]


def _complex(x: Tensor | None, pairs: int) -> Tensor:
    """Return features of the half-split layout as complex numbers, one for each pair; all ones for None."""
    if x is None:
        x = torch.ones(2 * pairs, dtype=torch.float64)
    if x.shape[-1] != 2 * pairs:
        raise ValueError(f"a query or key must hold 2 features per pair: expected {2 * pairs}, got {x.shape[-1]}")
    return torch.complex(x[..., :pairs].double(), x[..., pairs:].double())


# --- constructions ---------------------------------------------------------------------------------------------------


def rotate(inv_freq: Table, x: Features, positions: Distances) -> Float[Tensor, "distances features"]:
    """Return the images of ``x`` at the given positions [tokens], ``R^position x``: (positions, 2 pairs).

    >>> rotate(torch.tensor([math.pi / 2]), torch.tensor([1.0, 0.0]), torch.tensor([1])).round(decimals=6)
    tensor([[-0., 1.]], dtype=torch.float64)
    """
    angles = positions.double()[:, None] * zero_unrotated(inv_freq.double())
    turned = _complex(x, len(inv_freq)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=1)


def positional_head(inv_freq: Table, psi: Features, offset: int) -> tuple[Features, Features]:
    """Return a query and a key whose activation is largest ``offset`` tokens back, namely ``|psi|^2``.

    ``query = psi`` and ``key = R^offset psi``, the same at every position: offset 0 is the diagonal head, 1 the
    previous-token head. Scaled by a large enough factor the head attends there with any mass below 1
    (:func:`sharpness_for`).

    *Source*: Barbero et al. proposition 3.1 and theorem 5.3.

    Args:
        inv_freq: (pairs,) the table [rad/token].
        psi: (2 pairs,) any vector, the query before rotation.
        offset: the distance at which the activation is largest [tokens].
    """
    return psi.double(), rotate(inv_freq, psi, torch.tensor([offset]))[0]


def wendler_head(inv_freq: Table, alpha: float = 1.0) -> tuple[Features, Features]:
    """Return Wendler's previous-token head: ``key = (1…1, 0…0)`` and ``query = alpha R^-1 key``.

    Its activation for a query at ``m`` and a key at ``n`` is ``alpha sum_l cos((m - 1 - n) inv_freq_l)``, with its peak
    ``alpha pairs`` at ``n = m - 1``; ``alpha`` is the inverse temperature.

    *Source*: Wendler, ``W_q = alpha R^-1 W_k``, who writes the key ``(1, 0, 1, 0, …)`` in the interleaved layout.

    >>> table = torch.tensor([1.0, 0.1])
    >>> activation_curve(table, 3, *wendler_head(table, 10.0)).round(decimals=3).tolist()
    [15.353, 20.0, 15.353]
    """
    key = torch.tensor([1.0, 0.0], dtype=torch.float64).repeat_interleave(len(inv_freq))
    return alpha * rotate(inv_freq, key, torch.tensor([-1]))[0], key


def head_mass(
    inv_freq: Table, query: Features, key: Features, *, length: int, offset: int = 1, sharpness: float = 1.0
) -> Curve:
    """Return the attention weight on the token ``offset`` back, for a query at every position.

    All tokens have the same key, as in :func:`positional_head` and :func:`wendler_head`; attention is causal. Without
    rotation the weight at position ``m`` is ``1 / (m + 1)`` whatever the vectors (Barbero et al. proposition 5.2).

    *Source*: Barbero et al. theorem 5.3.

    Args:
        inv_freq: (pairs,) the table [rad/token].
        query: (2 pairs,) the query of every token before rotation.
        key: (2 pairs,) the key of every token before rotation.
        length: the number of positions [tokens].
        offset: the distance of the token whose weight is returned [tokens].
        sharpness: the factor on the activations, the inverse temperature. A model's own is ``1 / sqrt(head_dim)``.

    Returns:
        (length,) in [0, 1]; NaN at positions below ``offset``, which have no such token.

    >>> head_mass(torch.zeros(2), torch.ones(4), torch.ones(4), length=4).round(decimals=4).tolist()
    [nan, 0.5, 0.3333, 0.25]
    """
    logits = sharpness * _curve_beyond(inv_freq, length, query, key, offset)
    # The query at position m sees the distances 0 … m, so the sum in its softmax is a running one over distances.
    mass = (logits[offset] - torch.logcumsumexp(logits, dim=0)).exp()
    mass[:offset] = math.nan
    return mass


def _curve_beyond(inv_freq: Table, length: int, query: Features, key: Features, offset: int) -> Tensor:
    if not 0 <= offset < length:
        raise ValueError(f"offset must lie within the length, got offset {offset} and length {length}")
    return activation_curve(inv_freq, length, query, key)


def sharpness_for(
    inv_freq: Table, query: Features, key: Features, *, mass: float, length: int, offset: int = 1
) -> float:
    """Return the smallest factor on the activations with which every query puts ``mass`` on the token ``offset`` back.

    The weight is smallest at the last position and grows with the factor, so bisection finds it, to 12 digits.

    *Source*: Barbero et al. theorem 5.3 says that it exists, Wendler's temperature is its inverse; the value is ours.

    Args:
        inv_freq: (pairs,) the table [rad/token].
        query: (2 pairs,) the query of every token before rotation.
        key: (2 pairs,) the key of every token before rotation.
        mass: the attention weight that the token is to have, in (0, 1).
        length: the number of positions [tokens].
        offset: the distance of the token that is attended to [tokens].

    Raises:
        ValueError: no factor reaches the mass, since another distance has as large an activation, in float64 at least.

    >>> table = torch.tensor([1.0, 0.1])
    >>> round(sharpness_for(table, *wendler_head(table), mass=0.99, length=300), 2)
    322.58
    """
    if not 0 < mass < 1:
        raise ValueError(f"mass must be in (0, 1), got {mass}")
    logits = _curve_beyond(inv_freq, length, query, key, offset)
    behind = logits - logits[offset]
    if length > 1 and float(torch.cat([behind[:offset], behind[offset + 1 :]]).max()) >= 0:
        raise ValueError(
            f"no factor puts {mass} on the token {offset} back: another distance has as large an activation"
        )

    def reached(sharpness: float) -> bool:
        return float(torch.exp(-torch.logsumexp(sharpness * behind, dim=0))) >= mass

    low, high = 0.0, 1.0
    # This ends: every other activation is smaller, so the weight tends to 1.
    while not reached(high):
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


# --- images ----------------------------------------------------------------------------------------------------------


def image_distance(inv_freq: Table, apart: Distances) -> Curve:
    """Return the distance between two images of a unit vector whose positions are ``apart`` [tokens].

    ``sqrt(sum_j 4 sin(inv_freq_j apart / 2)^2 / pairs)``, for a vector whose pairs have equal norm.

    >>> image_distance(torch.tensor([torch.pi]), torch.tensor([0, 1])).round(decimals=6).tolist()
    [0.0, 2.0]
    """
    # Two points on the unit circle that are an angle a apart have the distance 2 sin(a / 2).
    steps, shares = zero_unrotated(inv_freq.double()) / 2, _shares(len(inv_freq))
    parts = [apart.new_zeros(0, dtype=torch.float64)]
    for part in torch.split(apart.double(), max(1, VALUES_AT_ONCE // len(steps))):
        parts.append((torch.sin(part[:, None] * steps).square() @ shares).sqrt())
    return 2 * torch.cat(parts)


def separation(inv_freq: Table, length: int) -> tuple[float, int]:
    """Return the smallest distance between two images within ``length`` positions, and how far apart they are [tokens].

    Xiong et al. take consecutive images for the closest. That fails when the fast pairs come round before the slow
    ones have moved: for few pairs, or a very large base.

    *Source*: Xiong et al. appendix B, ``q(f)``.

    >>> from rope_patch.frequencies import geometric
    >>> separation(geometric(10000.0, 8), 16384)[1]  # not 1: 1000 turns of pair 0 and 100 of pair 1, nearly
    6283
    """
    if length < 2:
        raise ValueError(f"length must hold two positions, got {length}")
    distances = image_distance(inv_freq, torch.arange(1, length))
    nearest = int(distances.argmin())
    return float(distances[nearest]), nearest + 1


def nearest_old(
    old: Table,
    new: Float[Tensor, " new_pairs"],
    *,
    old_length: int,
    new_positions: Distances,
) -> tuple[Curve, Tensor]:
    """Return how far each new image is from the nearest old one, and that one's position.

    *Source*: Xiong et al. appendix B, ``d(f, f_hat)``, which they print as the smallest over both positions; that is 0
    for every method. It costs ``old_length`` × positions × pairs multiplications; memory is bounded by blocks.

    Args:
        old: (pairs,) the table that the model was trained with [rad/token].
        new: (pairs,) the table in use [rad/token].
        old_length: the context that the model was trained with: old images are at the positions 0 … old_length - 1
            [tokens].
        new_positions: (distances,) the positions of the new images [tokens].

    Returns:
        (distances,) distances of a unit vector, float64, and (distances,) positions, int64.

    >>> table = torch.tensor([0.1])
    >>> nearest_old(table, table / 2, old_length=4, new_positions=torch.tensor([0, 4, 7]))[1].tolist()
    [0, 2, 3]
    """
    if len(old) != len(new):
        raise ValueError(f"the two tables must have the same number of pairs, got {len(old)} and {len(new)}")
    if old_length < 1:
        raise ValueError(f"old_length must be at least 1, got {old_length}")
    before, after, shares = zero_unrotated(old.double()), zero_unrotated(new.double()), _shares(len(old))
    distances, nearest = [], []
    # 2048 new images beside 1024 old ones are `VALUES_AT_ONCE` cosines.
    for part in torch.split(new_positions.double(), 2048):
        images = _images(part, after, shares)
        closest, at = torch.full_like(part, -torch.inf), torch.zeros(len(part), dtype=torch.int64)
        for first in range(0, old_length, 1024):
            olds = _images(torch.arange(first, min(first + 1024, old_length)), before, shares)
            best, where = (images @ olds.T).max(dim=1)  # the largest cosine is the smallest distance
            at = torch.where(best > closest, where + first, at)
            closest = torch.maximum(best, closest)
        # Again from the angle between the two: 1 - cosine would leave 1e-8 of a distance that is 0.
        halves = (at.double()[:, None] * before - part[:, None] * after) / 2
        distances.append(2 * (torch.sin(halves).square() @ shares).sqrt())
        nearest.append(at)
    return torch.cat(distances), torch.cat(nearest)


def _shares(pairs: int) -> Tensor:
    """Share of the squared norm in each pair: all have equal norm."""
    return torch.full((pairs,), 1 / pairs, dtype=torch.float64)


def _images(positions: Tensor, steps: Tensor, shares: Tensor) -> Tensor:
    """Images as real unit vectors whose products are cosines: (positions, 2 pairs)."""
    angles = positions.double()[:, None] * steps
    return torch.cat([angles.cos(), angles.sin()], dim=1) * shares.sqrt().repeat(2)
