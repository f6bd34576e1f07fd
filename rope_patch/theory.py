"""What a rotary table implies, without a model: a head built by hand, and distances between images.

Tables and lengths in, numbers and float64 tensors out. Everything is exact where it can be, and linear in the number of
positions unless it says otherwise, so a million positions take seconds.

*Sources*: Wendler, *Notes on rotary positional embeddings*, 2025 · Xiong et al., arXiv:2309.16039, appendix B ·
Barbero et al., arXiv:2410.06205 · Jonasson, arXiv:2503.01832, whose bounds are in :mod:`rope_patch.frequencies`.

Conventions are :mod:`rope_patch.frequencies`'s. A *distance* between tokens is the query's position minus the key's,
>= 0 in a causal model. The *image* of a vector is what rotation makes of it at a position; here it is that of a unit
vector whose pairs are of equal norm, and an attention scaling is divided out.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rope_patch.frequencies import Table, zero_unrotated

VALUES_AT_ONCE = 1 << 21
"""Number of elements of one intermediate tensor: 16 MiB in float64, whatever the number of positions."""


def previous_token_factor(inv_freq: Table, *, mass: float, length: int) -> float | None:
    """Return the smallest factor with which Wendler's previous-token head puts ``mass`` on the previous token.

    The head has the same query and key for every token, and its logit for a key ``r`` tokens back is
    ``factor sum_i cos((r - 1) inv_freq_i)``, largest for the previous one. The weight of that one is smallest at the
    last position and grows with the factor, so bisection finds the factor, to 12 digits.

    *Source*: Wendler, ``W_q = alpha R^-1 W_k``; Barbero et al. theorem 5.3 says that the factor exists, the value is
    ours.

    Args:
        inv_freq: (pairs,) the table [rad/token].
        mass: the attention weight that the previous token is to have for every query, in (0, 1).
        length: the number of positions, at least 2 [tokens].

    Returns:
        The factor; None where another distance has as large a logit, in float64 at least.

    >>> round(previous_token_factor(torch.tensor([1.0, 0.1]), mass=0.99, length=300), 2)
    322.58
    """
    steps = zero_unrotated(inv_freq.double())
    blocks = torch.split(torch.arange(-1, length - 1), max(1, VALUES_AT_ONCE // len(steps)))
    logits = torch.cat([(block[:, None] * steps).cos().sum(1) for block in blocks])
    behind = logits - logits[1]
    behind[1] = -torch.inf
    if float(behind.max()) >= 0:
        return None
    behind[1] = 0.0

    def reached(factor: float) -> bool:
        return float(torch.exp(-torch.logsumexp(factor * behind, dim=0))) >= mass

    low = 0.0
    high = 1.0
    # This ends: every other logit is smaller, so the weight tends to 1.
    while not reached(high):
        low = high
        high = 2 * low
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if reached(middle):
            high = middle
        else:
            low = middle
    return high


def separation(inv_freq: Table, length: int) -> tuple[float, int]:
    """Return the smallest distance between two images within ``length`` positions, and how far apart they are [tokens].

    Xiong et al. take consecutive images for the closest. That fails when the fast pairs come round before the slow
    ones have moved: for few pairs, or a very large base.

    *Source*: Xiong et al. appendix B, ``q(f)``.

    >>> from rope_patch.frequencies import geometric
    >>> separation(geometric(10000.0, 8), 16384)[1]  # not 1: 1000 turns of pair 0 and 100 of pair 1, nearly
    6283
    """
    steps = zero_unrotated(inv_freq.double())
    blocks = torch.split(torch.arange(1, length), max(1, VALUES_AT_ONCE // len(steps)))
    distances = torch.cat([_image_distance(block[:, None] * steps) for block in blocks])
    nearest = int(distances.argmin())
    return float(distances[nearest]), nearest + 1


def nearest_old(
    old: Table, new: Table, *, old_length: int, new_positions: Int[Tensor, " positions"]
) -> Float[Tensor, " positions"]:
    """Return how far each new image is from the nearest old one.

    *Source*: Xiong et al. appendix B, ``d(f, f_hat)``, which they print as the smallest over both positions; that is 0
    for every method. It costs ``old_length`` × positions × pairs multiplications; memory is bounded by blocks.

    Args:
        old: (pairs,) the table that the model was trained with [rad/token].
        new: (pairs,) the table in use [rad/token].
        old_length: the context that the model was trained with: old images are at the positions 0 … old_length - 1
            [tokens].
        new_positions: (positions,) the positions of the new images [tokens].

    >>> table = torch.tensor([0.1])
    >>> nearest_old(table, table / 2, old_length=4, new_positions=torch.tensor([0, 7])).round(decimals=6).tolist()
    [0.0, 0.049995]
    """
    before, after = zero_unrotated(old.double()), zero_unrotated(new.double())
    distances = []
    # 2048 new images beside 1024 old ones are `VALUES_AT_ONCE` cosines.
    for part in torch.split(new_positions.double(), 2048):
        images = _images(part, after)
        closest, at = torch.full_like(part, -torch.inf), torch.zeros(len(part), dtype=torch.int64)
        for first in range(0, old_length, 1024):
            olds = _images(torch.arange(first, min(first + 1024, old_length)), before)
            best, where = (images @ olds.T).max(dim=1)  # the largest cosine is the smallest distance
            at = torch.where(best > closest, where + first, at)
            closest = torch.maximum(best, closest)
        # Again from the angle between the two: 1 - cosine would leave 1e-8 of a distance that is 0.
        distances.append(_image_distance(at.double()[:, None] * before - part[:, None] * after))
    return torch.cat(distances)


def _image_distance(angles: Tensor) -> Tensor:
    """Distance between two images whose pairs are these angles (positions, pairs) apart [rad]: (positions,)."""
    # Two points on the unit circle that are an angle a apart have the distance 2 sin(a / 2).
    return 2 * torch.sin(angles / 2).square().mean(1).sqrt()


def _images(positions: Tensor, steps: Tensor) -> Tensor:
    """Images as real vectors of one length, whose products grow with their cosines: (positions, 2 pairs)."""
    angles = positions.double()[:, None] * steps
    return torch.cat([angles.cos(), angles.sin()], dim=1)
