"""Which table a fit chooses, by held-out prompts, held-out text and a second domain."""

from __future__ import annotations

import pytest
from support.fits import TEXT, candidate
from support.prompting import TOKENIZER

from rope_patch.evaluation.builtin_text import builtin_kind, builtin_text
from rope_patch.fitting.candidates import best
from rope_patch.fitting.texts import second_domain, split_text

START = ((10, 5), ([2.0], [3.0]))
BETTER = ([1.9], [2.9])


@pytest.mark.parametrize(
    ("others", "chosen"),
    [
        ([("a", (10, 4), ([1.0], [1.0]), 0.2)], "start"),  # better everywhere, but for a prompt
        ([("a", (10, 5), ([2.1], [1.0]))], "start"),  # or for one bucket
        ([("a", (4, 10), ([1.0], [1.0]))], "start"),  # or for one length, significantly
        ([("a", (9, 6), BETTER)], "a"),  # a prompt here for one there
        ([("a", (10, 4), BETTER, 0.11)], "start"),  # one prompt less, answers less probable
        ([("a", (10, 4), BETTER, 0.1)], "a"),  # one less, answers as probable: chance
        ([("a", (7, 2), BETTER, 0.05)], "start"),  # no length significantly, both together are
        ([("a", (10, 5), BETTER), ("b", (10, 6), ([2.0], [3.0]), 0.09)], "b"),  # retrieval first
        ([("a", (10, 5), BETTER), ("b", (10, 5), ([1.9], [2.8]))], "b"),  # then perplexity
        ([("a", *START)], "start"),  # the first of equals
    ],
)
def test_what_is_chosen_is_never_worse(others, chosen):
    assert best([candidate("start", *START), *(candidate(*other) for other in others)]).name == chosen


EVEN = [2.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("losses", "chosen"),
    [
        (([1.9, 2.0, 2.0, 2.0], EVEN), "a"),  # better
        ((EVEN, EVEN), "a"),  # the same
        (([2.1, 2.0, 1.9, 2.1], EVEN), "start"),  # worse on average, though not significantly
        (([1.0, 1.9, 1.8, 1.9], [2.10, 2.11, 2.09, 2.10]), "start"),  # far positions significantly worse
        (([1.0, 1.9, 1.8, 1.9], [2.3, 2.0, 2.0, 2.0]), "a"),  # far positions worse, but not significantly
    ],
)
def test_a_table_that_is_worse_on_the_second_domain_is_not_chosen(losses, chosen):
    """By hand: of 2.10 2.11 2.09 2.10 against 2 the mean is .1, Student's interval of 4 windows .1 ± 3.18 * .0041."""
    start = candidate("start", *START, second=(EVEN, EVEN))
    assert best([start, candidate("a", (10, 5), BETTER, second=losses)]).name == chosen


def test_prompts_of_one_haystack_count_as_few():
    """Of ten haystacks 9 against 5: significant of fifty prompts, but not where whole haystacks stand or fall."""
    start, other = (candidate(name, (count, 5), ([2.0], [3.0]), depths=5) for name, count in (("start", 9), ("a", 5)))
    change = other.changes(start)["retrieval"][64]
    assert change.estimate == pytest.approx(-0.4) and change.high > 0


def test_the_last_tenth_of_the_text_is_held_out():
    train, held_out = split_text(TEXT)
    assert train + held_out == TEXT and len(held_out) == pytest.approx(len(TEXT) / 10, rel=0.01)
    assert split_text([TEXT[:100], TEXT[100:]]) == split_text(TEXT[:100] + "\n\n" + TEXT[100:])


def test_the_second_domain_is_text_that_the_fit_did_not_see():
    windows = second_domain(TOKENIZER, TEXT, 96, 3)
    whole = builtin_kind("reference").text
    assert len(windows) == 3 and all(TOKENIZER.decode(w.ids[1:]).strip()[10:-10] in whole for w in windows)
    assert not set(builtin_kind("reference").documents) & set(builtin_kind("source").documents)
    assert not second_domain(TOKENIZER, TEXT, 1 << 20, 3), "the documentation is too short"
    assert not second_domain(TOKENIZER, builtin_text("train"), 96, 3), "the fit has seen it"
