"""Intervals against published figures, scipy and simulation."""

from __future__ import annotations

import math
import random

import pytest
from scipy import stats

from rope_patch.evaluation.intervals import paired_means, paired_shares, wilson


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


@pytest.mark.parametrize("shares", [(0.5, 0.2, 0.1, 0.2), (0.85, 0.1, 0.0, 0.05), (0.0, 0.6, 0.3, 0.1)])
def test_paired_shares_cover_what_they_say(shares):
    rng, true, covered = random.Random(0), shares[1] - shares[2], 0
    for _ in range(1500):
        drawn = rng.choices(range(4), shares, k=25)
        low, high = paired_shares(*pairs(*(drawn.count(i) for i in range(4))))
        covered += low <= true <= high
    assert covered / 1500 > 0.935


def test_paired_means_are_students():
    rng = random.Random(1)
    ours = [rng.gauss(2, 1) for _ in range(9)]
    theirs = [a + rng.gauss(0.3, 0.2) for a in ours]
    expected = stats.ttest_rel(ours, theirs).confidence_interval(0.9)
    assert paired_means(ours, theirs, 0.9) == pytest.approx((expected.low, expected.high))
    assert paired_means([1.0], [2.0]) == (-math.inf, math.inf)
    assert paired_means([1.0, 2.0], [1.0, 2.0]) == (0, 0)


@pytest.mark.parametrize("interval", [paired_means, paired_shares])
@pytest.mark.parametrize(("a", "b"), [([], []), ([1], [1, 0])])
def test_what_is_not_paired_is_refused(interval, a, b):
    with pytest.raises(ValueError, match="pairs are needed"):
        interval(a, b)
