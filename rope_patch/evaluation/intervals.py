"""Confidence intervals: of a share, of a paired difference of shares, of a paired difference of means."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy import stats


def wilson(correct: int, asked: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return Wilson's score interval of a share.

    *Source*: Wilson (1927), as in scipy.

    Example:
        >>> [round(x, 3) for x in wilson(25, 25)]
        [0.867, 1.0]
    """
    found = stats.binomtest(correct, asked).proportion_ci(confidence, method="wilson")
    return float(found.low), float(found.high)


def paired_shares(ours: Sequence[bool], theirs: Sequence[bool], confidence: float = 0.95) -> tuple[float, float]:
    """Return an interval of ``share(ours) - share(theirs)`` when both answered the same questions.

    It stays honest where the two never differ, or always do. *Source*: Newcombe (1998), Statistics in Medicine 17,
    2635-2650, method 10 (Wilson limits joined, with the continuity-corrected correlation of the pairs).

    Raises:
        ValueError: of different lengths, or empty.

    Example:
        >>> [round(x, 2) for x in paired_shares([True] * 20, [True] * 20)]
        [-0.16, 0.16]
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"pairs are needed, got {len(ours)} and {len(theirs)} answers")
    n = len(ours)
    both = sum(a and b for a, b in zip(ours, theirs, strict=True))
    first = sum(a and not b for a, b in zip(ours, theirs, strict=True))
    second = sum(b and not a for a, b in zip(ours, theirs, strict=True))
    neither = n - both - first - second
    p, q = (both + first) / n, (both + second) / n
    (low_p, high_p), (low_q, high_q) = wilson(both + first, n, confidence), wilson(both + second, n, confidence)
    margins = (both + first) * (second + neither) * (both + second) * (first + neither)
    numerator: float = both * neither - first * second
    if numerator > 0:
        numerator = max(numerator - n / 2, 0)
    correlation = numerator / math.sqrt(margins) if margins else 0.0

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * correlation * a * b + b * b))

    difference = p - q
    return (
        max(-1.0, difference - reach(p - low_p, high_q - q)),
        min(1.0, difference + reach(high_p - p, q - low_q)),
    )


def paired_means(ours: Sequence[float], theirs: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return Student's interval of ``mean(ours - theirs)`` over the same documents; infinite for a single one.

    Raises:
        ValueError: of different lengths, or empty.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"pairs are needed, got {len(ours)} and {len(theirs)} values")
    n = len(ours)
    if n == 1:
        return -math.inf, math.inf
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean = math.fsum(differences) / n
    error = math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1) / n)
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1)) * error
    return mean - half, mean + half
