"""What the papers name that follows from a rotary table alone: a head built by hand, and distances between images.

The notebook ``docs/tutorials/rope_mathematics.ipynb`` shows each of them beside the numbers of the papers.

*Sources*: Wendler, *Notes on rotary positional embeddings*, 2025 · Xiong et al., arXiv:2309.16039, appendix B ·
Barbero et al., arXiv:2410.06205. Jonasson's bounds and Xiong et al.'s granularity are in :mod:`rope_patch.frequencies`,
whose conventions hold here.

A *distance* between tokens is the query's position minus the key's, >= 0 in a causal model. The *image* of a vector is
what rotation makes of it at a position; here it is that of a unit vector whose pairs are of equal norm, and an
attention scaling is divided out.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rope_patch.frequencies import InvFreq, zero_unrotated


def positional_head_factor(inv_freq: InvFreq, *, mass: float, length: int, distance: int = 1) -> float | None:
    """Return the smallest factor with which a head built by hand puts ``mass`` on the token at one distance.

    The head has the same query and key for every token, and its logit for a key ``r`` tokens back is
    ``factor sum_i cos((r - distance) inv_freq_i)``, largest at that distance. The weight there is smallest at the last
    position and grows with the factor, so bisection finds the factor, to 12 digits.

    *Source*: Wendler, ``W_q = alpha R^-1 W_k``, a previous-token head; Barbero et al. proposition 3.1 builds it for any
    distance, and their theorem 5.3 says that the factor exists. The value is ours.

    Args:
        inv_freq: (pairs,) the table [rad/token].
        mass: the attention weight that the token at the distance is to have for every query that sees it, in (0, 1).
        length: the number of positions, more than the distance, at least 2 [tokens].
        distance: how far the head looks back [tokens].

    Returns:
        The factor; None where another distance has as large a logit, in float64 at least.

    Raises:
        ValueError: ``mass`` is not in (0, 1), so that no factor gives it; or the distance is not within the length.

    >>> round(positional_head_factor(torch.tensor([1.0, 0.1]), mass=0.99, length=300), 2)
    322.58
    """
    if not 0 < mass < 1:
        raise ValueError(f"mass must be in (0, 1), got {mass}")
    if length < 2 or distance not in range(length):
        raise ValueError(f"distance must be a whole number below the length of 2 or more, got {distance} of {length}")
    away = torch.arange(-distance, length - distance, dtype=torch.float64)
    logits = torch.zeros(length, dtype=torch.float64)
    # One pair at a time: a million positions of all pairs at once would take a gigabyte.
    for step in zero_unrotated(inv_freq.double()):
        logits += (away * step).cos()
    behind = logits - logits[distance]
    others = torch.cat([behind[:distance], behind[distance + 1 :]])
    if float(others.max()) >= 0:
        return None

    def reached(factor: float) -> bool:
        return float(torch.exp(-torch.logsumexp(factor * behind, dim=0))) >= mass

    low = 0.0
    high = 1.0
    # This ends: every other logit is smaller, so the weight tends to 1.
    while not reached(high):
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if reached(middle):
            high = middle
        else:
            low = middle
    return high


def separation(inv_freq: InvFreq, length: int) -> tuple[float, int]:
    """Return the smallest distance between two images within ``length`` positions, and how far apart they are [tokens].

    Xiong et al. take consecutive images for the closest. That fails when the fast pairs come round before the slow
    ones have moved: for few pairs, or a very large base.

    *Source*: Xiong et al. appendix B, ``q(f)``.

    >>> from rope_patch.frequencies import geometric
    >>> separation(geometric(10000.0, 8), 16384)[1]  # not 1: 1000 turns of pair 0 and 100 of pair 1, nearly
    6283
    """
    apart = torch.arange(1, length, dtype=torch.float64)
    squares = torch.zeros_like(apart)
    for step in zero_unrotated(inv_freq.double()):
        # Two points on the unit circle that are an angle a apart have the distance 2 sin(a / 2).
        squares += (2 * torch.sin(apart * step / 2)).square()
    nearest = int(squares.argmin())
    return float((squares[nearest] / len(inv_freq)).sqrt()), nearest + 1


def nearest_old(
    old: InvFreq, new: InvFreq, *, old_length: int, new_positions: Int[Tensor, " positions"]
) -> Float[Tensor, " positions"]:
    """Return how far each new image is from the nearest old one.

    *Source*: Xiong et al. appendix B, ``d(f, f_hat)``, which they print as the smallest over both positions; that is 0
    for every method. It costs ``old_length`` × positions × pairs multiplications.

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
    trained = _images(torch.arange(old_length), old)
    distances = []
    # 1024 new images at a time beside old ones of 32k tokens take 256 MiB.
    for positions in torch.split(new_positions, 1024):
        images = _images(positions, new)
        # The largest cosine is the smallest distance, which is then taken from the difference of the two images:
        # computed from a cosine that is rounded, a distance of 0 would be 1e-8.
        nearest = trained[(images @ trained.T).argmax(dim=1)]
        distances.append((images - nearest).norm(dim=1))
    return torch.cat(distances)


def _images(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Images as real unit vectors: (positions, 2 pairs)."""
    angles = positions.double()[:, None] * zero_unrotated(inv_freq.double())
    return torch.cat([angles.cos(), angles.sin()], dim=1).div(len(inv_freq) ** 0.5)
