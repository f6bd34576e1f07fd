"""Confidence intervals of a share, of a paired difference of shares, and of a paired difference of means."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy import stats

CONFIDENCE = 0.95
"""Confidence of an interval by itself, and of all intervals of a column of a comparison together."""
POPULATION = (
    "An interval over windows speaks of windows of this text, over which they are spread evenly: on other texts a "
    "difference may be another. An interval over prompts speaks of prompts of this task in haystacks like these."
)
"""The population that an interval is about, which every model card states."""


def wilson(
    correct: float, asked: float, confidence: float = CONFIDENCE, *, count: float | None = None
) -> tuple[float, float]:
    """Return Wilson's score interval of a share.

    *Source*: Wilson (1927).

    Args:
        correct: number of right answers.
        asked: number of all answers.
        confidence: confidence of the interval, in (0, 1).
        count: number of independent answers that these are worth (:func:`effective_count`); by default ``asked``.

    Example:
        >>> [round(x, 3) for x in wilson(25, 25)]
        [0.867, 1.0]
    """
    n = asked if count is None else count
    share = correct / asked
    z = float(stats.norm.ppf((1 + confidence) / 2))
    middle = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # Rounding can put an end slightly beyond 0 or 1.
    return max(0.0, (middle - half) / (1 + z * z / n)), min(1.0, (middle + half) / (1 + z * z / n))


def paired_shares(
    ours: Sequence[float], theirs: Sequence[float], confidence: float = CONFIDENCE, *, count: float | None = None
) -> tuple[float, float]:
    """Return an interval of ``share(ours) - share(theirs)``, where both answered the same questions.

    It has a width even if the two never differ, or always do. *Source*: Newcombe (1998), Statistics in Medicine 17,
    2635-2650, method 10 (Wilson limits joined, with the continuity-corrected correlation of the pairs).

    Args:
        ours: 1 for each right answer of ours, and 0 for each other one.
        theirs: the same of their answers to the same questions.
        confidence: confidence of the interval, in (0, 1).
        count: number of independent questions that these are worth (:func:`effective_count`); by default the number of
            questions.

    Example:
        >>> [round(x, 2) for x in paired_shares([True] * 20, [True] * 20)]
        [-0.16, 0.16]
    """
    n = float(len(ours) if count is None else count)
    kinds = list(zip(ours, theirs, strict=True))
    both, first, second, neither = (
        n * kinds.count(kind) / len(kinds) for kind in ((True, True), (True, False), (False, True), (False, False))
    )
    p = (both + first) / n
    q = (both + second) / n
    low_p, high_p = wilson(both + first, n, confidence)
    low_q, high_q = wilson(both + second, n, confidence)
    # The phi coefficient of the two-by-two table of pairs, whose numerator is corrected for continuity as in the paper.
    margins = (both + first) * (second + neither) * (both + second) * (first + neither)
    numerator = both * neither - first * second
    if numerator > 0:
        numerator = max(numerator - n / 2, 0.0)
    correlation = numerator / math.sqrt(margins) if margins else 0.0

    def reach(a: float, b: float) -> float:
        # Rounding can make the sum slightly negative.
        return math.sqrt(max(0.0, a * a - 2 * correlation * a * b + b * b))

    difference = p - q
    return (
        max(-1.0, difference - reach(p - low_p, high_q - q)),
        min(1.0, difference + reach(high_p - p, q - low_q)),
    )


def effective_count(groups: Sequence[Sequence[float]], confidence: float = CONFIDENCE) -> float:
    """Return how many independent answers groups of answers are worth in an interval of a share.

    The answers of a group, such as those of one haystack, may be alike, and how much alike they are is estimated from
    few groups. So the estimate of :func:`independent_count` is multiplied by the squared ratio of the normal quantile
    to Student's, whose degrees of freedom are the number of groups minus one. *Source*: Korn and Graubard (1998),
    Survey Methodology 24, 193-201.

    If all values are equal, they do not tell how much alike a group is. Each group then counts as one answer, and their
    number is adjusted so that Wilson's interval for no right answer equals the exact one of Clopper and Pearson (1934).
    A bootstrap or Student's interval over groups would have no width in this case, and a permutation of signs has no 95
    % interval below six groups. Simulations of all of these are in ``benchmarks/results/interval_coverage.json``.

    Args:
        groups: values of each group, all of the same size; for an interval of a difference, the differences of paired
            answers.
        confidence: confidence of the interval that the count is for.

    Example:
        >>> groups = [[1, 1, 1], [0, 0, 1], [1, 1, 1], [1, 0, 1]]
        >>> round(independent_count(groups), 1), round(effective_count(groups), 1)
        (8.4, 3.2)
        >>> round(effective_count([[1, 1, 1]] * 4), 1)
        2.5
    """
    total = len(groups)
    # Groups of one value have nothing in common, so no correction is needed.
    if len(groups[0]) == 1:
        return float(total)
    z = float(stats.norm.ppf((1 + confidence) / 2))
    if total == 1 or len({value for group in groups for value in group}) == 1:
        # Clopper and Pearson's upper limit for no right answer in `total`; Wilson's is z²/(count + z²), solved here for
        # the count.
        exact = 1 - ((1 - confidence) / 2) ** (1 / total)
        return float(z * z * (1 - exact) / exact)
    return independent_count(groups) * (z / float(stats.t.ppf((1 + confidence) / 2, total - 1))) ** 2


def independent_count(groups: Sequence[Sequence[float]]) -> float:
    """Return how many independent values groups of correlated values are worth (by their design effect).

    The result lies between the number of groups (all values of a group are alike) and the number of values (those of a
    group are no more alike than others). *Source*: Kish (1965), Survey Sampling, section 5.4, with the intraclass
    correlation from a one-way analysis of variance. It is an estimate, and a rough one below ten groups, which
    :func:`effective_count` allows for.

    Args:
        groups: values of each of several groups, all of the same size above one; not all values are equal.

    Example:
        >>> independent_count([[1, 1, 1], [0, 0, 0], [1, 1, 1]])
        3.0
    """
    size = len(groups[0])
    total = len(groups) * size
    means = [math.fsum(group) / size for group in groups]
    middle = math.fsum(means) / len(groups)
    between = size * math.fsum((m - middle) ** 2 for m in means) / (len(groups) - 1)
    within = math.fsum((x - m) ** 2 for m, group in zip(means, groups, strict=True) for x in group)
    within /= total - len(groups)
    # The estimate can be negative by chance, which would make the values worth more than their number.
    correlation = min(1.0, max(0.0, (between - within) / (between + (size - 1) * within)))
    return total / (1 + (size - 1) * correlation)


def paired_means(ours: Sequence[float], theirs: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return Student's interval of ``mean(ours - theirs)`` over the same documents; it is infinite for a single one.

    If differences are as skewed as an exponential distribution, the interval contains the true mean in 87 % of draws
    with 4 windows, and in 94 % with 50.
    """
    n = len(ours)
    if n == 1:
        return -math.inf, math.inf
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean = math.fsum(differences) / n
    error = math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1) / n)
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1)) * error
    return mean - half, mean + half
