"""Successive halving: what is measured, and what it costs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.prompting import TOKENIZER

from rope_patch.evaluation.needle_suite import NeedleSuite
from rope_patch.extending.round_sizes import Round, rounds_of, rounds_within, windows_read
from rope_patch.options.evaluation import EvalSpec
from rope_patch.texts.builtin_text import builtin_text


def test_a_round_costs_what_it_measures_anew():
    """Three candidates and the unpatched model read 4 windows each. Then 2 and it read 4 more."""
    assert windows_read(rounds_of(3, 4)[:2]) == 4 * 4 + 3 * 4


@given(st.integers(1, 12), st.floats(0, 1e3))
def test_rounds_read_no_more_than_is_allowed(candidates, most):
    found = rounds_within(candidates, most)
    assert found[0].candidates == candidates
    assert windows_read(found) <= most or found == (Round(candidates, 1),)


def test_more_time_measures_no_less():
    sizes = [windows_read(rounds_within(7, most)) for most in range(0, 300, 5)]
    assert sizes == sorted(sizes) and sizes[-1] > 5 * sizes[0]


def suite(windows, text):
    return NeedleSuite(EvalSpec([256], windows=windows), TOKENIZER, text)


def test_the_windows_of_a_round_are_among_those_of_the_next():
    whole = suite(13, builtin_text("heldout").text[:60_000])
    parts = [whole.smaller(n) for n in range(1, 14)]
    for smaller, larger in itertools.pairwise(parts):
        assert len(larger.laden) == len(smaller.laden) + 1 and all(one in larger.laden for one in smaller.laden)
    places = [whole.laden.index(one) for one in parts[3].laden]
    assert places == sorted(places) and places[-1] - places[0] >= 6, "in the order of the text, and spread over it"
    assert parts[3].spec.windows == parts[3].spec.samples == 4 and whole.spec.windows == 13


@pytest.mark.parametrize(("count", "places"), [(1, [0]), (2, [1]), (3, [1]), (9, [4]), (12, [4]), (64, [32])])
def test_a_single_window_is_not_the_beginning_of_the_text(count, places):
    text = " ".join(f"{i:05}" for i in range(6000))  # each word stands once
    whole = suite(count, text)
    window = whole.smaller(1).laden[0]
    assert [i for i, one in enumerate(whole.laden) if one is window] == places
    alone = suite(1, text).laden[0].window.source
    assert 2950 < int(TOKENIZER.decode(alone.ids[60:])[-60:].split()[1]) < 3050
