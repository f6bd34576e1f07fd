"""The mean over RULER's tasks, and the length up to which it is kept."""

from __future__ import annotations

from statistics import fmean

import pytest
from support.commands import run
from support.evaluated import compared, result_of, retrieval_of
from support.prompting import HAY, TOKENIZER, bold

import rope_patch
from rope_patch.evaluation.effective_length import effective_sentence
from rope_patch.evaluation.metrics import METRICS
from rope_patch.evaluation.tasks import members

RULER = members("ruler")


def scores(by_length, tasks=RULER):
    """A result in which each task answers these shares of ten prompts by length."""
    hits = {(length, 0.5): [i < 10 * share for i in range(10)] for length, share in by_length.items()}
    return result_of(None, *(retrieval_of(hits, task) for task in tasks))


def test_the_effective_length_is_the_last_before_the_score_falls():
    result = scores({4096: 1.0, 8192: 0.9, 16384: 0.8, 32768: 1.0})
    assert rope_patch.effective_length(result) == 8192, "what comes after a fall does not count"
    assert rope_patch.effective_length(result, 0.7) == 32768
    assert rope_patch.effective_length(scores({4096: 0.8, 8192: 1.0})) == 0
    with pytest.raises(ValueError, match="ruler"):
        rope_patch.effective_length(scores({4096: 1.0}, RULER[1:]))


def test_the_mean_is_over_tasks_and_pairs_haystacks_by_their_number():
    asked = {"tasks": ["ruler"], "lengths": (1200, 1300), "depths": (0.2, 0.8), "samples": 2, "windows": 0}
    made = compared(bold(), TOKENIZER, ["default", "pi:factor=2"], haystack=HAY, **asked)
    assert made.spec.tasks == tuple(RULER) and len(RULER) == 11
    (first, second) = [column for column in made.columns() if column.metric == "mean"]
    assert (first.heading, second.heading) == ("mean of ruler 1200", "mean of ruler 1300")
    for row, value in zip(made.rows, first.values, strict=True):
        assert value == pytest.approx(fmean(row.scores.retrieval[task].accuracy(1200) for task in RULER))
    assert len(METRICS["mean"].values(made.rows[0].scores, first.span)) == 2, "one value for each haystack"


def test_the_command_says_the_effective_length_of_each_method(tmp_path):
    llama = rope_patch.data_path("assets") / "llama"
    asked = ("--tasks", "ruler", "--lengths", "1100", "--samples", 1, "--depths", 0.5, "--windows", 0, "--no-report")
    said = run("compare", llama, "--methods", "default", *asked, "-o", tmp_path / "out")
    assert "default: no part of RULER-11 is right at 1100 tokens already" in said
    assert "mean of ruler 1100" in said and "niah_single_3 1100" in said, "the tasks have a table of their own"
    assert "Log-probability" not in said
    sentence = effective_sentence("yarn", scores({4096: 0.8, 8192: 0.7}))
    assert "effective length none by RULER's" in sentence and "4096 by 90% of its own mean at 4096" in sentence
