"""What the page of a cache check shows of its answers: shares, and a few answers as they were given."""

from __future__ import annotations

from rope_patch.evaluation.answers import few_answers, one_of_each
from rope_patch.evaluation.metrics import Metric, Span
from rope_patch.evaluation.suite import EvalResult
from rope_patch.kv_evaluation.results import KVCheck
from rope_patch.reports.blocks import SchemeRow, SchemeTable
from rope_patch.reports.comparison import Cell


def value_cell(metric: Metric, scores: EvalResult, span: Span) -> Cell:
    """Return a value, and below that of retrieval the share of answers that are first choice."""
    value = metric.format_long(metric.value(scores, span))
    if metric.name != "retrieval" or span.task is None:
        return Cell(value)
    share = scores.retrieval[span.task].first_choice(span.stop)
    return Cell(value, f"first choice {metric.format_long(share)}")


def answers_table(check: KVCheck) -> SchemeTable:
    """Return a few answers of each scheme as they were given."""
    lines = []
    for name, scores in check.named_scores():
        for _, one in one_of_each(few_answers([(name, scores)])):
            cells = [Cell(str(one.length)), Cell(one.place or "–")]
            cells += [Cell(text, mark="text") for text in (one.task, one.expected, one.quoted, one.verdict)]
            lines.append(SchemeRow(name, cells))
    return SchemeTable(
        "A few answers",
        "Of each scheme the first wrong answer, where there is one, and the first right one, among the shortest and "
        "the longest prompts.",
        ("Scheme", "Length [tokens]", "Depth", "Task", "Asked for", "Answer", "Exact match"),
        lines,
    )
