"""Rounds of measurements: successive halving until a deadline, with the same reading under all methods."""

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.prompting import TOKENIZER
from support.tiny import small

from rope_patch.evaluation.finished_work import open_work
from rope_patch.evaluation.needle_suite import NeedleSuite
from rope_patch.extending import measure as engine
from rope_patch.extending.measure import Clock, measure, rounds_of, windows_read
from rope_patch.options.evaluation import EvalSpec
from rope_patch.options.extend import ExtendSettings
from rope_patch.runtime.progress import listen
from rope_patch.texts.builtin_text import builtin_text


def test_a_round_costs_what_it_measures_anew():
    """Three candidates and the unpatched model read 8 windows each. Then 2 and it read 8 more."""
    assert windows_read(rounds_of(3, 64)[:2]) == 4 * 8 + 3 * 8


@given(st.integers(1, 12), st.integers(1, 64))
def test_each_round_reads_more_text_under_no_more_methods(candidates, windows):
    rounds = rounds_of(candidates, windows)
    assert rounds[0][0] == candidates and rounds[-1][1] <= windows
    for (more, fewer_windows), (fewer, more_windows) in itertools.pairwise(rounds):
        assert more_windows >= fewer_windows and fewer <= more


METHODS = ["yarn:factor=2", "pi:factor=2", "ntk:factor=2", "abf:factor=4"]
SETTINGS = ExtendSettings("tiny", 256, methods=tuple(METHODS), tolerance=1.0, evaluation=EvalSpec((256,)))


@pytest.fixture
def read(monkeypatch):
    """Measures until a deadline, where each window takes so many seconds; returns the comparisons and what was read."""
    model = small(max_position_embeddings=128)
    now = [0.0]
    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def run(seconds, window=1.0, expected=1.0, windows=4, stored=None):
        spec = EvalSpec((128, 256), tasks=("passkey",), windows=windows)
        suite = NeedleSuite(spec, TOKENIZER, builtin_text("heldout").text[:40_000])
        seen = []

        def one_window(stage, tokens):
            seen.append((stage, tokens))
            now[0] += window * tokens / 256

        with listen(one_window):
            work = open_work(model, {} if stored is None else stored)
            found = measure(model, suite, METHODS, Clock(now[0] + seconds, expected), work, SETTINGS)
        return found, seen

    return run


def labels(comparison):
    return {row.label for row in comparison.rows}


@pytest.mark.parametrize("seconds", [5.5, 9.5, 40.0])
def test_wherever_it_ends_all_methods_of_a_round_have_the_same_reading(read, seconds):
    found, seen = read(seconds)
    for comparison in found:
        counts = {row.scores.perplexity.windows for row in comparison.rows}
        assert counts == {comparison.spec.windows} and "default" in labels(comparison)
    assert labels(found[0]) == {"default", *METHODS}
    assert sum(tokens for _, tokens in seen) <= 256 * seconds


def test_more_time_reads_more(read):
    """Five passes over a window; then two methods and the unpatched model read on."""
    sizes = []
    for seconds in (4.9, 5.1, 9.0):
        found, _ = read(seconds)
        sizes.append([(len(comparison.rows), comparison.spec.windows) for comparison in found])
    assert sizes[0] == [] and sizes[1] == [(5, 1)]
    assert sizes[2][0] == (5, 1) and sizes[2][-1][0] == 3


def test_a_machine_that_turns_out_slower_stops_before_the_deadline(read):
    """A window was expected to take one second, and takes three: after the first one no room is left for the rest."""
    found, seen = read(10.0, window=3.0)
    assert not found and sum(tokens for _, tokens in seen) == 256


def test_what_was_finished_is_not_read_again(read):
    stored = {}
    first, _ = read(60.0, stored=stored)
    again, seen = read(60.0, expected=0.1, stored=stored)
    assert [one.to_json() for one in again] == [one.to_json() for one in first]
    assert not sum(tokens for _, tokens in seen)


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
