"""The mean over RULER's tasks, and the length up to which it is kept."""

from statistics import fmean

import pytest
from support.evaluated import compared, result_of, retrieval_of
from support.prompting import HAY, TOKENIZER
from support.tiny import small

import rope_patch
from rope_patch.evaluation.effective_length import effective_sentence
from rope_patch.evaluation.metrics import METRICS
from rope_patch.evaluation.tasks import members
from rope_patch.reports import comparison as report
from rope_patch.runtime.page import render

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
    with pytest.raises(ValueError, match="RULER"):
        rope_patch.effective_length(scores({4096: 1.0}, RULER[1:]))


def test_the_mean_is_over_tasks_and_pairs_haystacks_by_their_number():
    asked = {"tasks": ["ruler"], "lengths": (1100,), "depths": (0.5,), "samples": 2, "windows": 0}
    made = compared(small(num_hidden_layers=1), TOKENIZER, ["default"], haystack=HAY, **asked)
    assert made.spec.tasks == tuple(RULER) and len(RULER) == 11
    (column,) = [column for column in made.columns() if column.metric == "mean"]
    scores_of_all = made.rows[0].scores
    assert column.values == pytest.approx([fmean(scores_of_all.retrieval[task].accuracy(1100) for task in RULER)])
    assert len(METRICS["mean"].values(scores_of_all, column.span)) == 2, "one value for each haystack"
    shown = render(report.page([made]))
    (first, _) = report.summary(made, [column])
    assert first == effective_sentence("default", scores_of_all)
    assert "Tasks of ruler" in shown and "niah_single_3 1100" in shown, "the tasks have a table of their own"
    assert "Log-probability" not in shown
