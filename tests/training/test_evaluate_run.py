"""Evaluations of a run: their numbers, and what is said of the difference between two of them."""

import pytest
from datasets import Dataset
from support.evaluated import perplexity_of, result_of, retrieval_of
from support.prompting import TOKENIZER
from support.recipe_runs import recipe
from support.tiny import bundled_model

from rope_patch.training.evaluate_run import changes, evaluate_model, metrics, score, suite_of


def result(answers, losses=()):
    """An evaluation at 64 tokens: which prompts were answered, by depth and haystack, and the loss of each window."""
    hits = {(64, i / 10): column for i, column in enumerate(answers)}
    text = perplexity_of([[loss] for loss in losses], (0, 64)) if losses else None
    return result_of(text, retrieval_of(hits))


def by_metric(before, after):
    return {change["metric"]: change for change in changes(before, after)}


def test_a_difference_within_the_noise_is_no_difference():
    """One prompt of twenty less: the score is lower, and nothing may be said of it."""
    before = result([[1] * 10, [1] * 10], [2.0, 2.1, 2.2])
    after = result([[1] * 10, [1] * 9 + [0]], [2.01, 2.08, 2.2])
    assert score(after) < score(before)
    metric_changes = by_metric(before, after)
    assert metric_changes["retrieval"]["estimate"] == pytest.approx(-0.05)
    assert {change["verdict"] for change in metric_changes.values()} == {"no significant difference"}


@pytest.mark.parametrize(("first", "second", "verdict"), [(1, 0, "worse"), (0, 1, "better")])
def test_a_difference_beyond_the_noise_is_said(first, second, verdict):
    change = by_metric(result([[first] * 10] * 2), result([[second] * 10] * 2))["retrieval"]
    assert change["verdict"] == verdict
    assert change["sentence"].startswith(f"passkey 64 is significantly {verdict} than before training: retrieval ")


def test_the_loss_of_text_is_compared_window_by_window():
    """The windows differ by 1 nat among each other and by .1 between the runs: only pairs show the difference."""
    before = result([[1]], [1.0, 2.0, 3.0, 4.0])
    after = result([[1]], [1.1, 2.11, 3.09, 4.1])
    worse = by_metric(before, after)["perplexity"]
    better = by_metric(after, before)["perplexity"]
    assert worse["verdict"] == "worse" and better["verdict"] == "better"
    # differences .1, .11, .09, .1: mean .1, standard deviation .008165, t(3, .975) = 3.18245, over the root of 4
    assert [worse[name] for name in ("estimate", "low", "high")] == pytest.approx([0.1, 0.087007, 0.112993], abs=1e-5)


def test_perplexity_only_parts_equals():
    """The worst perplexity does not outweigh a single prompt."""
    assert score(result([[1, 1]], [99.0])) > score(result([[1, 0]], [0.01]))
    assert score(result([[1, 0]], [2.0])) > score(result([[1, 0]], [2.1]))


def options(*words):
    small = ("model.name=llama", "train.max_length=64", "output=x", "evaluation.lengths=48 64", "evaluation.samples=1")
    return recipe(*small, "evaluation.depths=0.0,1.0", "evaluation.windows=2", *words)


def test_an_evaluation_is_numbers_by_length(capfd):
    model = bundled_model().train()
    numbers = metrics(evaluate_model(suite_of(options(), TOKENIZER), model))
    assert model.training, "left as it was"
    named = {"score", "retrieval_48", "retrieval_64", "perplexity_0_48", "perplexity_48_64", "logprob_64"}
    assert named <= numbers.keys() and "logprob_48" not in numbers
    assert "evaluating: " in capfd.readouterr().err


@pytest.mark.parametrize("word", ["evaluation.windows=90000", "evaluation.lengths=16"])
def test_what_cannot_be_evaluated_is_said_before_any_training(word):
    with pytest.raises(ValueError, match="evaluation"):
        suite_of(options(word), TOKENIZER)


@pytest.mark.parametrize(("tokens", "windows"), [(64, 1), (3 * 64 - 1, 2), (3 * 64, 3)])
def test_texts_that_were_held_out_give_as_many_windows_as_they_have_room_for(tokens, windows):
    text = TOKENIZER.decode([TOKENIZER.encode("a", add_special_tokens=False)[-1]] * tokens)
    assert (
        len(suite_of(options("evaluation.windows=9"), TOKENIZER, Dataset.from_dict({"text": [text]})).windows)
        == windows
    )
