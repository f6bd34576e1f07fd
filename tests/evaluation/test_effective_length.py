"""Effective lengths of results that are made up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.evaluated import perplexity_of, result_of, retrieval_of

from rope_patch.evaluation.effective_length import effective_lengths

LENGTHS = (8, 16, 32)


def scores(answers, losses):
    """Results of one model: how many of 40 prompts it answers at each length, and the loss of each window there."""
    hits = {(n, 0.5): [i < right for i in range(40)] for n, right in zip(LENGTHS, answers, strict=True)}
    return result_of(perplexity_of(list(zip(*losses, strict=True)), (0, *LENGTHS)), retrieval_of(hits))


SAME = [[2.0, 2.1, 1.9]] * 3
UNPATCHED = scores([40, 40, 0], [*SAME[:2], [5.0, 5.1, 4.9]])


def by_metric(result, trained_length=16):
    found = effective_lengths({"default": UNPATCHED, "yarn": result}, trained_length)
    return {one.metric: one for one in found.lengths if one.method == "yarn"}


@pytest.mark.parametrize(
    ("right", "expected"),
    [
        ([40, 40, 40], "32 or more"),  # of 40: the lower end of Wilson's interval is .912, above .9
        ([40, 39, 40], "8 (16 not shown)"),  # .871 to .996
        ([40, 20, 40], "8 (16 too long)"),
        ([0, 40, 40], "below 8"),
    ],
)
def test_prompts_must_be_answered_at_each_length_up_to_the_effective_one(right, expected):
    assert str(by_metric(scores(right, SAME))["retrieval"]) == expected


def test_perplexity_holds_within_five_percent_of_the_unpatched_model():
    """.04 nats are 4.1 %, in all windows; .05 are 5.13 %."""
    near = [[x + 0.04 for x in row] for row in SAME]
    assert str(by_metric(scores([40] * 3, near))["perplexity"]) == "32 or more"
    far = [*SAME[:2], [x + 0.05 for x in SAME[2]]]
    assert str(by_metric(scores([40] * 3, far))["perplexity"]) == "16 (32 too long)"
    mixed = [*SAME[:2], [2.0 + 0.3, 2.1 - 0.3, 1.9 + 0.1]]
    assert str(by_metric(scores([40] * 3, mixed))["perplexity"]) == "16 (32 not shown)"


def test_perplexity_is_compared_at_the_same_positions_within_the_trained_length():
    """The beginning of a text is hard for any model: a loss of 3 there is no loss of the method."""
    hard = [[3.0, 3.1, 2.9], *SAME[1:]]
    found = effective_lengths({"default": scores([40] * 3, hard), "yarn": scores([40] * 3, hard)}, 16)
    assert {str(one) for one in found.lengths if one.metric == "perplexity"} == {"32 or more"}


def test_nothing_is_said_of_tasks_that_the_unpatched_model_fails():
    weak = scores([40, 20, 0], SAME)
    found = effective_lengths({"default": weak, "yarn": scores([40] * 3, SAME)}, 16)
    assert {one.metric for one in found.lengths} == {"perplexity"}
    assert "75%" in found.explanation


@pytest.mark.parametrize(("name", "trained"), [("pi", 16), ("default", 4)])
def test_none_without_the_unpatched_model_within_its_trained_length(name, trained):
    assert effective_lengths({name: UNPATCHED}, trained) is None


def test_the_explanation_says_how_many_prompts_suffice():
    found = effective_lengths({"default": scores([40, 39, 0], SAME)}, 16)
    assert "can be shown" not in found.explanation, "40 prompts can: the model lost one"
    few = replace(found, samples=4, depths=5)  # (.025) ** (1 / 36) = .903, with 35 haystacks .89996
    assert "at least 36" in few.explanation
