"""Successive halving: all candidates at a small cost, the better half at twice the cost, until two are left."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

TOO_FEW = (
    "one window and one haystack for each length hardly tell methods apart: give more time with --budget, or name "
    "fewer with --methods"
)
FIRST_ROUND_SIZES = ((1, 1), (2, 1), (4, 1), (4, 2), (8, 2), (8, 4))
"""Windows of text and haystacks of the first round, from the smallest."""


@dataclass(frozen=True)
class Round:
    """One round of measurements.

    Attributes:
        candidates: the number of methods that are measured; the unpatched model is measured besides.
        windows: the number of windows of text, those of earlier rounds among them.
        samples: the number of haystacks for each task and length, those of earlier rounds among them.
    """

    candidates: int
    windows: int
    samples: int


def rounds_of(candidates: int, windows: int, samples: int) -> tuple[Round, ...]:
    """Return the rounds of a number of candidates; the last two are compared in two rounds.

    >>> [(r.candidates, r.windows, r.samples) for r in rounds_of(7, 4, 1)]
    [(7, 4, 1), (4, 8, 2), (2, 16, 4), (2, 32, 8)]
    >>> rounds_of(1, 4, 1)
    (Round(candidates=1, windows=4, samples=1), Round(candidates=1, windows=8, samples=2))

    Args:
        candidates: the number of methods in the first round.
        windows: the number of windows of text in the first round.
        samples: the number of haystacks for each task and length in the first round.
    """
    counts = [candidates]
    while counts[-1] > 2:
        counts.append(math.ceil(counts[-1] / 2))
    return tuple(Round(n, windows * 2**i, samples * 2**i) for i, n in enumerate([*counts, counts[-1]]))


def rounds_cost(rounds: tuple[Round, ...], cost: Callable[[int, int], float]) -> float:
    """Return the cost of all rounds, of which each measures only what the rounds before did not.

    Args:
        rounds: the rounds, in order.
        cost: gives the cost of a number of windows and of haystacks under one method.
    """
    total, windows, samples = 0.0, 0, 0
    for one in rounds:
        # One more than the candidates: the unpatched model. What earlier rounds measured is in the result cache.
        total += (one.candidates + 1) * cost(one.windows - windows, one.samples - samples)
        windows, samples = one.windows, one.samples
    return total


def rounds_within(candidates: int, most: float, cost: Callable[[int, int], float]) -> tuple[Round, ...]:
    """Return the largest rounds that cost no more than is allowed.

    Where the smallest ones cost more, later rounds are left out; the first one always takes place.

    Args:
        candidates: the number of methods in the first round.
        most: the largest cost that is allowed, in the unit of ``cost``.
        cost: gives the cost of a number of windows and of haystacks under one method.
    """
    fitting = [r for size in FIRST_ROUND_SIZES if rounds_cost(r := rounds_of(candidates, *size), cost) <= most]
    if fitting:
        return fitting[-1]
    smallest = rounds_of(candidates, *FIRST_ROUND_SIZES[0])
    counts = [n for n in range(1, len(smallest)) if rounds_cost(smallest[:n], cost) <= most]
    return smallest[: max(counts, default=1)]
