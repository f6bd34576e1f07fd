"""Evaluations of a run: their progress bar, and what is said of the difference between two of them."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch.training.evaluating import RecordedEvaluations, changes, evaluation_tokens
from rope_patch.training.judging import Judge
from rope_patch.training.reading import read

LLAMA = rope_patch.data_path("assets") / "llama"


def result(answers, losses=(), task="passkey"):
    """An evaluation as JSON: which prompts were answered, [depth][haystack], and the loss of each window."""
    cells = [
        {"length": 64, "depth": i / 10, "samples": [{"correct": bool(correct)} for correct in column]}
        for i, column in enumerate(answers)
    ]
    windows = [{"total_nll": loss * 10, "total_tokens": 10} for loss in losses]
    return {
        "retrieval": {"task": task, "cells": cells},
        "perplexity": {"documents": windows} if windows else None,
    }


def test_a_difference_within_the_noise_is_no_difference():
    """One prompt of twenty less: the old rule said that the model scores lower."""
    before = result([[1] * 10, [1] * 10], [2.0, 2.1, 2.2])
    after = result([[1] * 10, [1] * 9 + [0]], [2.01, 2.08, 2.2])
    retrieval, perplexity = changes(before, after)
    assert retrieval.after < retrieval.before and retrieval.verdict == "no significant difference"
    assert retrieval.low < 0 < retrieval.high
    assert perplexity.verdict == "no significant difference"
    assert str(retrieval).startswith(
        "no significant difference in retrieval from before training (-0.05 over 20 prompts"
    )


@pytest.mark.parametrize(("first", "second", "verdict"), [(1, 0, "worse"), (0, 1, "better")])
def test_a_difference_beyond_the_noise_is_said(first, second, verdict):
    found, _ = changes(result([[first] * 10] * 2, [1.0, 2.0]), result([[second] * 10] * 2, [1.0, 2.0]))
    assert found.verdict == verdict and found.count == 20
    direction = {"worse": "lower", "better": "higher"}[verdict]
    assert str(found).startswith(f"retrieval is significantly {direction} than before training (")


def test_the_loss_of_text_is_compared_window_by_window():
    """The windows differ by 1 nat among each other and by .1 between the runs: only pairs show the difference."""
    before, after = [1.0, 2.0, 3.0, 4.0], [1.1, 2.11, 3.09, 4.1]
    _, worse = changes(result([[1]], before), result([[1]], after))
    _, better = changes(result([[1]], after), result([[1]], before))
    assert worse.verdict == "worse" and "the loss of text is significantly higher than before" in str(worse)
    assert better.verdict == "better" and better.after - better.before == pytest.approx(-0.1)
    # differences .1, .11, .09, .1: mean .1, standard error .00816/2 = .00408, t(3, .975) = 3.18245
    assert (worse.low, worse.high) == pytest.approx((0.1 - 0.012993, 0.1 + 0.012993), abs=1e-5)


def test_answers_to_one_haystack_count_once_where_they_depend_on_each_other():
    """Four of twelve haystacks are lost, all five depths of each: 4 of 12, not 20 of 60."""
    before = result([[1] * 12] * 5)
    whole = result([[0] * 4 + [1] * 8] * 5)
    mixed = copy.deepcopy(before)
    for i in range(20):
        mixed["retrieval"]["cells"][i % 5]["samples"][i % 12]["correct"] = False
    (dependent,), (independent,) = changes(before, whole), changes(before, mixed)
    assert dependent.after == independent.after == pytest.approx(40 / 60)
    assert dependent.low < independent.low < 0 and dependent.high > independent.high


def test_one_window_gives_no_interval():
    _, found = changes(result([[1]], [2.0]), result([[1]], [9.0]))
    assert found.verdict == "no significant difference" and "one window gives no interval" in str(found)
    assert found.to_dict()["low"] is None, "JSON has no infinity"


def test_without_windows_only_retrieval_is_compared():
    assert [change.measure for change in changes(result([[1]]), result([[0]]))] == ["retrieval"]


def test_the_progress_bar_of_an_evaluation_ends_at_its_tokens(tmp_path, capfd):
    options = read(
        overrides=[
            "model.name=llama",
            "data.lengths=64",
            "output=x",
            "evaluation.lengths=48 64",
            "evaluation.samples=1",
            "evaluation.depths=[0.0,1.0]",
            "evaluation.windows=2",
        ]
    )
    evaluator = Judge(options.evaluation, options.evaluation_lengths, AutoTokenizer.from_pretrained(LLAMA))
    # 2 windows of 64, 2 prompts of 48 and of 64
    total = sum(evaluation_tokens(options))
    assert total == 2 * 64 + 2 * 48 + 2 * 64
    seen = []
    evaluator(AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32), seen.append)
    assert sum(seen) == total and len(seen) >= 4, "in several steps"
    evaluate = RecordedEvaluations(evaluator, tmp_path / "evaluations.jsonl", total)
    capfd.readouterr()
    metrics = evaluate(AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32), 0)
    assert "evaluating: " in capfd.readouterr().err
    assert evaluate.before["metrics"] == metrics
