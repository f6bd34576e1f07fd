"""A comparison in three sentences, for the top of its report."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rope_patch.evaluation.compare import Column, Comparison
from rope_patch.evaluation.effective_length import UNPATCHED
from rope_patch.evaluation.metrics import METRICS

_NAMED = 3  # methods that a sentence names before it counts the others


def summary(comparison: Comparison, names: Mapping[str, str]) -> list[str]:
    """Return what was measured, and for each metric and task which method is best at the longest length.

    A metric that is no finite number for some method is left out.

    Args:
        comparison: of any number of methods.
        names: by method, as the report shows it.
    """
    spec, rows = comparison.spec, comparison.rows
    methods = "One method" if len(rows) == 1 else f"{len(rows)} methods"
    score = rows[0].scores.perplexity
    windows = "" if score is None else f"perplexity in {score.windows} × {score.window} tokens of text, and "
    lengths = ", ".join(map(str, spec.lengths))
    sentences = [
        f"{methods} on {comparison.model or 'a model without a name'}, trained at {comparison.trained_length} tokens: "
        f"{windows}retrieval ({', '.join(spec.tasks)}) in prompts of {lengths} tokens."
    ]
    longest: dict[tuple[str, str | None], Column] = {}
    for column in comparison.columns():
        known = longest.setdefault((column.metric, column.task), column)
        if column.stop >= known.stop:
            longest[column.metric, column.task] = column
    return sentences + list(filter(None, (_best(comparison, column, names) for column in longest.values())))


def _best(comparison: Comparison, column: Column, names: Mapping[str, str]) -> str:
    metric = METRICS[column.metric]
    values = dict(zip((row.method for row in comparison.rows), column.values, strict=True))
    if not all(map(math.isfinite, values.values())):
        return ""
    best = comparison.rows[column.best].method
    where = "in prompts of" if column.start is None else "at positions"
    label = metric.title(column.span).partition(" at ")[0].partition(",")[0]
    if column.task and len(comparison.spec.tasks) > 1:
        label += f" of {column.task}"
    text = f"{label} {where} {metric.span_text(column.span)} tokens: "
    value = metric.format_long(values[best])
    if len(values) == 1:
        return f"{text}{value}."
    equal = [names[one.method] for one in column.differences if not one.significant]
    if column.winner is not None:
        text += f"{names[best]} is best ({value}), ahead of every other method by the intervals"
    elif len(equal) == len(values) - 1:
        text += f"the intervals separate no method from the best value ({value})"
    else:
        others = ", ".join(equal[:_NAMED]) + (f" and {len(equal) - _NAMED} more" if len(equal) > _NAMED else "")
        text += f"{names[best]} ({value}) is best, but not separable from {others}"
    if UNPATCHED in values:
        patch = comparison.environment.get("patch before")
        given = "the unpatched model" if patch is None else f"the model as it was given ({patch})"
        text += f"; {given} has {metric.format_long(values[UNPATCHED])}"
    return f"{text}."
