"""Successive halving: what is measured, and what it costs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.prompting import HAY, TOKENIZER

from rope_patch.evaluation.builtin_text import builtin_text
from rope_patch.evaluation.suite import EvalSuite
from rope_patch.extending.round_sizes import Round, rounds_cost, rounds_of, rounds_within
from rope_patch.options.evaluation import EvalSpec


def cost(windows, samples):
    return 10 * windows + 30 * samples


def test_a_round_costs_what_it_measures_anew():
    """Three candidates and the unpatched model read 4 windows and 1 haystack: 4 × 70. Then 2 and it as much again."""
    assert rounds_cost(rounds_of(3, 4, 1)[:2], cost) == 4 * 70 + 3 * 70


@given(st.integers(1, 12), st.floats(0, 1e5))
def test_rounds_cost_no_more_than_is_allowed(candidates, most):
    found = rounds_within(candidates, most, cost)
    assert found[0].candidates == candidates
    assert rounds_cost(found, cost) <= most or found == (Round(candidates, 1, 1),)


def test_more_time_measures_no_less():
    sizes = [rounds_cost(rounds_within(7, most, cost), cost) for most in range(0, 20_000, 500)]
    assert sizes == sorted(sizes) and sizes[-1] > 5 * sizes[0]


def test_the_windows_of_a_round_are_among_those_of_the_next():
    text = builtin_text("heldout").text[:60_000]
    suite = EvalSuite(EvalSpec([128], windows=13, samples=4), TOKENIZER, text=text, haystack=HAY)
    starts = [[tuple(window.ids.tolist()) for window in suite.smaller(n, 1).windows] for n in range(14)]
    for smaller, larger in itertools.pairwise(starts):
        assert len(larger) == len(smaller) + 1 and all(ids in larger for ids in smaller)
    whole = [tuple(window.ids.tolist()) for window in suite.windows]
    places = [whole.index(ids) for ids in starts[4]]
    assert places == sorted(places) and places[-1] - places[0] >= 6, "in the order of the text, and spread over it"
    assert suite.smaller(4, 2).spec.windows == 4 and suite.spec.windows == 13


@pytest.mark.parametrize(("count", "places"), [(1, [0]), (2, [1]), (3, [1]), (9, [4]), (12, [4]), (64, [32])])
def test_a_single_window_is_not_the_beginning_of_the_text(count, places):
    text = " ".join(f"{i:05}" for i in range(6000))  # each word stands once
    suite = EvalSuite(EvalSpec([128], windows=count), TOKENIZER, text=text, haystack=HAY)
    window = suite.smaller(1, 1).windows[0]
    assert [i for i, one in enumerate(suite.windows) if one is window] == places
    (alone,) = EvalSuite(EvalSpec([128], windows=1), TOKENIZER, text=text, haystack=HAY).windows
    assert 2950 < int(TOKENIZER.decode(alone.ids[60:])[-60:].split()[1]) < 3050


@pytest.mark.parametrize(("windows", "samples"), [(14, 1), (-1, 1), (2, 5), (2, 0)])
def test_no_part_is_larger_than_the_whole(windows, samples):
    text = builtin_text("heldout").text[:60_000]
    suite = EvalSuite(EvalSpec([128], windows=13, samples=4), TOKENIZER, text=text, haystack=HAY)
    with pytest.raises(ValueError, match=r"windows must be 0 to 13 and samples 1 to 4, got"):
        suite.smaller(windows, samples)
