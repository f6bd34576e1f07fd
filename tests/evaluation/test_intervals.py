"""Intervals against published figures, scipy and simulation."""

import math
import random

import pytest
from scipy import stats

from rope_patch.evaluation.intervals import effective_count, paired_means, paired_shares, wilson


@pytest.mark.parametrize(
    ("right", "asked", "low", "high"),
    [
        (8, 10, 0.490, 0.943),
        (0, 10, 0.0, 0.278),  # z² / (n + z²) = 3.8416 / 13.8416
        (10, 10, 0.722, 1.0),
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998 (one sample), table I, method 3
    ],
)
def test_wilson(right, asked, low, high):
    assert wilson(right, asked) == pytest.approx((low, high), abs=6e-4)


def pairs(both, first, second, neither):
    ours = [True] * (both + first) + [False] * (second + neither)
    theirs = [True] * both + [False] * first + [True] * second + [False] * neither
    return ours, theirs


def test_paired_shares_by_hand():
    """20 questions, 15 and 10 right, 10 by both: p = .75, q = .5, phi corrected for continuity."""
    l1, u1 = wilson(15, 20)
    l2, u2 = wilson(10, 20)
    phi = (10 * 5 - 5 * 0 - 20 / 2) / math.sqrt(15 * 5 * 10 * 10)
    low = 0.25 - math.sqrt((0.75 - l1) ** 2 - 2 * phi * (0.75 - l1) * (u2 - 0.5) + (u2 - 0.5) ** 2)
    high = 0.25 + math.sqrt((u1 - 0.75) ** 2 - 2 * phi * (u1 - 0.75) * (0.5 - l2) + (0.5 - l2) ** 2)
    assert paired_shares(*pairs(10, 5, 0, 5)) == pytest.approx((low, high))
    assert low > 0, "five against none of twenty"


def test_paired_shares_are_antisymmetric_and_keep_their_distance_from_certainty():
    for counts in [(10, 5, 2, 3), (0, 20, 0, 0), (20, 0, 0, 0), (0, 0, 0, 20), (3, 0, 0, 17), (5, 5, 5, 5)]:
        ours, theirs = pairs(*counts)
        low, high = paired_shares(ours, theirs)
        assert paired_shares(theirs, ours) == pytest.approx((-high, -low))
        assert -1 <= low <= (counts[1] - counts[2]) / 20 <= high <= 1 and low < high
    low, high = paired_shares(*pairs(0, 20, 0, 0))
    assert 0.7 < low < 0.8 and high == 1, "all against none of twenty is no proof of all against none"


def test_paired_means_are_students():
    rng = random.Random(1)
    ours = [rng.gauss(2, 1) for _ in range(9)]
    theirs = [a + rng.gauss(0.3, 0.2) for a in ours]
    expected = stats.ttest_rel(ours, theirs).confidence_interval(0.9)
    assert paired_means(ours, theirs, 0.9) == pytest.approx((expected.low, expected.high))
    assert paired_means([1.0], [2.0]) == (-math.inf, math.inf)
    assert paired_means([1.0, 2.0], [1.0, 2.0]) == (0, 0)


# --- answers of haystacks


def test_haystacks_all_alike_count_once_and_exactly():
    """None of four: Clopper and Pearson's upper end is 1 - .025^(1/4) = .6024."""
    for value in (0.0, 1.0):
        groups = [[value] * 5] * 4
        assert wilson(int(20 * value), 20, count=effective_count(groups)) == pytest.approx(
            (0.0, 0.6024) if value == 0 else (0.3976, 1.0), abs=1e-4
        )


def test_the_count_of_few_haystacks_is_lowered_by_students_quantile():
    """Eight haystacks of one right answer in two: no more alike than chance, 16 answers times (1.960 / 2.365)^2."""
    assert effective_count([[0, 1]] * 8) == pytest.approx(16 * (1.95996 / 2.36462) ** 2, abs=1e-3)
    assert effective_count([[0, 0], [1, 1]] * 4) == pytest.approx(8 * (1.95996 / 2.36462) ** 2, abs=1e-3)
    assert effective_count([[1.0]] * 8) == 8, "one depth: nothing is estimated"


def test_intervals_of_haystacks_cover_what_they_say():
    """Of 400 draws 95 % have a standard error of 1.1 points; intervals of few discrete answers cover more than 95 %.

    Of four haystacks with five prompts each, 70 % of the variance is the haystack's own. Taken as 20 independent
    prompts, the interval covers too little: why haystacks are counted.
    """
    rng = random.Random(0)
    covered = 0
    independent = 0
    for _ in range(400):
        share = rng.uniform(0.02, 0.98)
        limit = stats.norm.ppf(share)
        groups = []
        for _ in range(4):
            own = rng.gauss(0, 0.7**0.5)
            groups.append([float(own + rng.gauss(0, 0.3**0.5) < limit) for _ in range(5)])
        right = int(sum(map(sum, groups)))
        low, high = wilson(right, 20, count=effective_count(groups))
        covered += low <= share <= high
        low, high = wilson(right, 20)
        independent += low <= share <= high
    assert covered / 400 > 0.935
    assert independent / 400 < 0.9
