"""Distances between the images of one vector at different positions.

The images of ``x`` under RoPE lie on a curve on a sphere; how close two of them come says how well positions can be
distinguished, and how far a patched table's images lie from those the model was trained on. *Source*: Xiong et al.,
arXiv:2309.16039, appendix B. ``x`` is scaled to norm 1, and by default all its pairs have equal norm. An attention
scaling would change the norm of every image alike: it is divided out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rope_patch.frequencies import Table, pair_shares, zero_unrotated
from rope_patch.theory.decay import BLOCK, Curve, Distances, Features


class Separation(NamedTuple):
    """The closest two images.

    Attributes:
        distance: between them, of a unit vector; at most 2.
        apart: how far apart their positions are; 1 for neighbours [tokens].
    """

    distance: float
    apart: int


class Gap(NamedTuple):
    """The new image that is farthest from every old one.

    Attributes:
        distance: to its nearest old image, of a unit vector.
        new: its position [tokens].
        old: the position of that nearest old image [tokens].
    """

    distance: float
    new: int
    old: int


def image_distance(inv_freq: Table, apart: Distances, x: Features | None = None) -> Curve:
    """Return the distance between two images of a unit vector whose positions are ``apart``.

    ``sqrt(sum_j w_j 4 sin(inv_freq_j apart / 2)^2)`` with ``w_j`` the share of ``||x||^2`` in pair ``j``. It depends on
    the difference alone; between two tables there is no such shortcut (:func:`nearest_old`).

    Args:
        inv_freq: (pairs,) [rad/token].
        apart: (distances,) [tokens].
        x: (2 pairs,) in Hugging Face's half-split layout, or None for pairs of equal norm.

    >>> image_distance(torch.tensor([torch.pi]), torch.tensor([0, 1])).round(decimals=6).tolist()
    [0.0, 2.0]
    """
    steps, shares = zero_unrotated(inv_freq.double()) / 2, _shares(x, len(inv_freq))
    parts = [
        (torch.sin(part[:, None] * steps).square() @ shares).sqrt()
        for part in torch.split(apart.double(), max(1, BLOCK // len(steps)))
    ]
    return 2 * torch.cat(parts) if parts else apart.double()


def separation(inv_freq: Table, length: int, x: Features | None = None) -> Separation:
    """Return q: the smallest distance between two images within ``length`` positions, and how far apart they are.

    Xiong et al. take consecutive images for the closest. That holds if ``apart`` is 1, and fails when the fast pairs
    come round before the slow ones have moved: for few pairs, or a very large base.

    *Source*: Xiong et al. appendix B, ``q(f)``. It needs every difference once: linear in ``length``.

    Args:
        inv_freq: (pairs,) [rad/token].
        length: positions, at least 2 [tokens].
        x: (2 pairs,), or None for pairs of equal norm.

    >>> from rope_patch.frequencies import geometric
    >>> separation(geometric(10000.0, 8), 16384).apart  # not 1: 1000 turns of pair 0 and 100 of pair 1, nearly
    6283
    """
    if length < 2:
        raise ValueError(f"length must hold two positions, got {length}")
    distances = image_distance(inv_freq, torch.arange(1, length), x)
    nearest = int(distances.argmin())
    return Separation(float(distances[nearest]), nearest + 1)


def nearest_old(
    old: Table,
    new: Float[Tensor, " new_pairs"],
    *,
    old_length: int,
    new_positions: Distances,
    x: Features | None = None,
) -> tuple[Curve, Tensor]:
    """Return how far each new image is from the nearest old one, and that one's position.

    *Source*: Xiong et al. appendix B, ``d(f, f_hat)``. It depends on ``old k - new j``, so it costs ``old_length`` ×
    positions × pairs multiplications; memory is bounded by blocks.

    Args:
        old: (pairs,) the table the model was trained with [rad/token].
        new: (pairs,) the table in use [rad/token].
        old_length: trained context: old images are at 0 … old_length - 1 [tokens].
        new_positions: (distances,) [tokens].
        x: (2 pairs,), or None for pairs of equal norm.

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
    before, after, shares = zero_unrotated(old.double()), zero_unrotated(new.double()), _shares(x, len(old))
    distances, nearest = [], []
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
    if not nearest:
        return new_positions.double(), torch.zeros(0, dtype=torch.int64)
    return torch.cat(distances), torch.cat(nearest)


def farthest_image(old: Table, new: Table, *, old_length: int, new_length: int, x: Features | None = None) -> Gap:
    """Return the new image that is farthest from every old one: how far the farthest position is from training.

    Xiong et al. print ``d`` as a smallest distance over both positions, which is 0 for every method, since the images
    at 0 coincide. This is the largest distance from a *new* image to its nearest old one. The other direction, swapped
    arguments, is 0 for interpolation and for extrapolation, whose images include every old one.

    *Source*: Xiong et al. appendix B, ``d(f, f_hat)``, changed as said; cost as :func:`nearest_old`.

    Args:
        old: (pairs,) the table the model was trained with [rad/token].
        new: (pairs,) the table in use [rad/token].
        old_length: trained context [tokens].
        new_length: context in use [tokens].
        x: (2 pairs,), or None for pairs of equal norm.

    >>> from rope_patch.frequencies import geometric
    >>> table = geometric(10000.0, 128)
    >>> round(farthest_image(table, table / 4, old_length=512, new_length=2048).distance, 3)
    0.185
    """
    distances, nearest = nearest_old(old, new, old_length=old_length, new_positions=torch.arange(new_length), x=x)
    at = int(distances.argmax())
    return Gap(float(distances[at]), at, int(nearest[at]))


def helix(speed: float, times: Float[Tensor, " times"]) -> Float[Tensor, "times 3"]:
    """Return the points ``(cos t, sin t, sin(speed t))``: two pairs of RoPE drawn in three dimensions.

    *Source*: Xiong et al. figure 8. A smaller ``speed`` (interpolation slows both angles, an adjusted base the slow
    one alone) flattens the curve, so that windings come closer to each other.

    Args:
        speed: of the slow angle relative to the fast one.
        times: (times,) the fast angle [rad].

    >>> helix(0.5, torch.tensor([0.0, torch.pi], dtype=torch.float64)).round(decimals=3).tolist()
    [[1.0, 0.0, 0.0], [-1.0, 0.0, 1.0]]
    """
    times = times.double()
    return torch.stack([times.cos(), times.sin(), (speed * times).sin()], dim=1)


def _shares(x: Features | None, pairs: int) -> Tensor:
    """Share of the squared norm in each pair."""
    return torch.full((pairs,), 1 / pairs, dtype=torch.float64) if x is None else pair_shares(x, pairs)


def _images(positions: Tensor, steps: Tensor, shares: Tensor) -> Tensor:
    """Images as real unit vectors whose products are cosines: (positions, 2 pairs)."""
    angles = positions.double()[:, None] * steps
    return torch.cat([angles.cos(), angles.sin()], dim=1) * shares.sqrt().repeat(2)
