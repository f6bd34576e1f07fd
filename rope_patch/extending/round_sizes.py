"""Successive halving: all candidates on few windows of text, the better half on twice as many, until two are left."""

from __future__ import annotations

import math
from dataclasses import dataclass

TOO_FEW = (
    "one or two windows of text, with a prompt in each, hardly tell methods apart: give more time with --budget, or "
    "name fewer with --methods"
)
FIRST_ROUND_WINDOWS = (1, 2, 4, 8)
"""Windows of text of the first round, from the smallest."""


@dataclass(frozen=True)
class Round:
    """One round of measurements.

    Attributes:
        candidates: the number of methods that are measured; the unpatched model is measured besides.
        windows: the number of windows of text, those of earlier rounds among them.
    """

    candidates: int
    windows: int


def rounds_of(candidates: int, windows: int) -> tuple[Round, ...]:
    """Return the rounds of a number of candidates; the last two are compared in two rounds.

    >>> [(r.candidates, r.windows) for r in rounds_of(7, 4)]
    [(7, 4), (4, 8), (2, 16), (2, 32)]
    >>> rounds_of(1, 4)
    (Round(candidates=1, windows=4), Round(candidates=1, windows=8))

    Args:
        candidates: the number of methods in the first round.
        windows: the number of windows of text in the first round.
    """
    counts = [candidates]
    while counts[-1] > 2:
        counts.append(math.ceil(counts[-1] / 2))
    return tuple(Round(n, windows * 2**i) for i, n in enumerate([*counts, counts[-1]]))


def windows_read(rounds: tuple[Round, ...]) -> int:
    """Return how many windows all rounds read, of which each measures only what the rounds before did not."""
    total = 0
    before = 0
    for one in rounds:
        # One more than the candidates: the unpatched model. What earlier rounds measured is in the result cache.
        total += (one.candidates + 1) * (one.windows - before)
        before = one.windows
    return total


def rounds_within(candidates: int, most: float) -> tuple[Round, ...]:
    """Return the largest rounds that read no more windows than is allowed.

    Where the smallest ones read more, later rounds are left out; the first one always takes place.

    Args:
        candidates: the number of methods in the first round.
        most: the largest number of windows.
    """
    for size in reversed(FIRST_ROUND_WINDOWS):
        rounds = rounds_of(candidates, size)
        if windows_read(rounds) <= most:
            return rounds
    while len(rounds) > 1 and windows_read(rounds) > most:
        rounds = rounds[:-1]
    return rounds
