"""Compares several methods on one model: perplexity by position and retrieval, on the same texts and prompts."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from torch import nn

from rope_patch.evaluation.finished_work import Resume, open_work
from rope_patch.evaluation.intervals import CONFIDENCE
from rope_patch.evaluation.metrics import (
    METRICS,
    Metric,
    PairedDifference,
    Span,
    change_sentence,
    column_heading,
    value_text,
)
from rope_patch.evaluation.suite import EvalResult, Suite, as_suite, retrieval_warnings
from rope_patch.methods import MethodLike
from rope_patch.methods.default import Default
from rope_patch.modeling.environment import environment
from rope_patch.modeling.reader import model_name
from rope_patch.options.evaluation import EvalSpec
from rope_patch.patching.encode import PatchPlan, PatchRequest
from rope_patch.patching.install import for_target, installed, plan_patch
from rope_patch.patching.locate import Location, locate
from rope_patch.patching.verify import inspect_model, trained_length
from rope_patch.runtime import progress
from rope_patch.runtime.result_cache import finite
from rope_patch.tables import RotaryTable

# The version of the layout of comparison.json: raise it when a field changes.
SCHEMA = 6
UNPATCHED = "default"
"""The method string of the model as it is."""
InPlace = Callable[[], AbstractContextManager[tuple[RotaryTable, ...]]]
"""A function that puts a method into a model within a ``with`` block, and gives its tables."""


@dataclass(frozen=True)
class Row:
    """The scores of one method.

    Attributes:
        method: the method as a method string.
        scores: the perplexity and the retrieval of the method.
        tables: the rotary tables that it used, one for each layer type.
        trained: whether the model was trained under the method before it was measured.
    """

    method: str
    scores: EvalResult
    tables: tuple[RotaryTable, ...]
    trained: bool = False

    @property
    def label(self) -> str:
        """Name of the row; a comparison may hold a trained and an untrained row of one method."""
        return row_name(self.method, self.trained)


def row_name(method: str, trained: bool) -> str:
    """Return the name of a method's row.

    >>> row_name("yarn:factor=2", trained=True)
    'yarn:factor=2 after training'
    """
    return f"{method} after training" if trained else method


@dataclass(frozen=True)
class Column:
    """One metric of all methods.

    Attributes:
        metric: name of the metric, a key of :data:`~rope_patch.evaluation.metrics.METRICS`.
        span: positions or prompts that the metric is measured over.
        values: value of each row.
        best: index of the row with the best value; the first one if several are equal.
        winner: label of the row whose differences from all other rows are significant; None if there is none.
        differences: difference of every other row from the best one, by the label of the row and in the unit of the
            metric.
    """

    metric: str
    span: Span
    values: tuple[float, ...]
    best: int
    winner: str | None
    differences: dict[str, PairedDifference]

    @property
    def heading(self) -> str:
        """Heading of the column in a printed table."""
        return column_heading(METRICS[self.metric], self.span)

    def to_dict(self) -> dict[str, Any]:
        """Return the column as JSON values."""
        values: dict[str, Any] = finite(asdict(self))
        values |= values.pop("span")
        return values


@dataclass(frozen=True)
class Comparison:
    """The scores of every method, and what they were measured on.

    Attributes:
        rows: rows of the methods, in the order in which these were given.
        spec: the spec of what was measured.
        trained_length: trained context length of the model, as :func:`~rope_patch.patching.verify.trained_length`
            returns it [tokens].
        text: SHA-256 of the held-out text.
        text_name: name of the held-out text.
        model: class of the model, and name of its checkpoint.
        environment: versions of the packages, device and data type.
    """

    rows: tuple[Row, ...]
    spec: EvalSpec
    trained_length: int
    text: str
    text_name: str
    model: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def scores(self) -> dict[str, EvalResult]:
        """The scores of each row, by its label."""
        return {row.label: row.scores for row in self.rows}

    @property
    def warnings(self) -> list[str]:
        """Sentences that the reader should know before reading the scores."""
        # The model had a patch of its own, so "default" is not the unpatched model.
        if "patch before" in self.environment:
            return []
        return retrieval_warnings(self.scores, UNPATCHED, self.trained_length)

    def columns(self) -> list[Column]:
        """Return the columns of the table, metric by metric, with paired differences."""
        return [self._column(metric, span) for metric in METRICS.values() for span in metric.spans(self.spec)]

    def difference(self, method: str, other: str, metric: str, span: Span) -> PairedDifference:
        """Return how one method differs from another in one metric, without the correction for several methods.

        Args:
            method: label of the method's row.
            other: label of the row that it is compared with.
            metric: name of the metric, a key of :data:`~rope_patch.evaluation.metrics.METRICS`.
            span: positions of the text between two edges of buckets, or the prompts of a task.
        """
        return METRICS.find(metric).difference(self.scores[method], self.scores[other], span)

    def __str__(self) -> str:
        """Return the scores of each method, and how each differs from the unpatched model, or from the first one."""
        lines = [f"{self.model}, trained at {self.trained_length} tokens"]
        columns = self.columns()
        for i, row in enumerate(self.rows):
            scores = [f"{column.heading} {value_text(METRICS[column.metric], column.values[i])}" for column in columns]
            lines.append(f"  {row.label}: {', '.join(scores)}")
        names = [row.label for row in self.rows]
        first = UNPATCHED if UNPATCHED in names else names[0]
        names.remove(first)
        if names:
            lines.append(f"Against {first}, paired by window and by prompt, with {CONFIDENCE:.0%} intervals:")
        for name in names:
            changes = []
            for column in columns:
                change = self.difference(name, first, column.metric, column.span)
                changes.append(f"{column.heading}: {change_sentence(METRICS[column.metric], change)}")
            lines.append(f"  {name}: {'; '.join(changes)}")
        return "\n".join(lines)

    def _column(self, metric: Metric, span: Span) -> Column:
        values = [metric.value(row.scores, span) for row in self.rows]
        choose = min if metric.lower_is_better else max
        best = choose(range(len(values)), key=values.__getitem__)
        # The best row was chosen by its measured value, so each interval is wide enough for those of all pairs to hold
        # together (Bonferroni).
        each = 1 - (1 - CONFIDENCE) / max(1, math.comb(len(self.rows), 2))
        differences = {
            row.label: metric.difference(row.scores, self.rows[best].scores, span, each)
            for i, row in enumerate(self.rows)
            if i != best
        }
        winner = None
        if differences and all(difference.significant for difference in differences.values()):
            winner = self.rows[best].label
        return Column(metric.name, span, tuple(values), best, winner, differences)

    def to_json(self) -> str:
        """Return everything as JSON."""
        rows = []
        for row in self.rows:
            values: dict[str, Any] = {"method": row.label}
            if row.trained:
                values["trained"] = True
            values |= row.scores.to_dict()
            values["tables"] = [
                {
                    "layer_type": table.layer_type,
                    "inv_freq": table.inv_freq.tolist(),
                    "attention_scaling": table.attention_scaling,
                }
                for table in row.tables
            ]
            rows.append(values)
        result = {
            "schema": SCHEMA,
            "model": self.model,
            "lengths": self.spec.lengths,
            "spec": self.spec.to_dict(),
            "seed": self.spec.seed,
            "confidence": CONFIDENCE,
            "trained_length": self.trained_length,
            "text": self.text,
            "text_name": self.text_name,
            "environment": self.environment,
            "warnings": self.warnings,
            "columns": [column.to_dict() for column in self.columns()],
            "rows": rows,
        }
        # NaN and infinity are not JSON: allow_nan=False raises where one was not replaced.
        return json.dumps(result, indent=1, allow_nan=False)


def compare(
    model: nn.Module,
    tokenizer: Any,
    methods: Sequence[MethodLike],
    spec: EvalSpec | Suite,
    *,
    layer_types: Sequence[str] | None = None,
    freeze_at: int | None = None,
    resume: Resume = None,
) -> Comparison:
    """Measure several methods on a model, which is returned to its state before the call.

    All methods read the same windows and prompts, so their differences are paired.

    Args:
        model: a causal language model; an adapter on it is measured under every method. If the model is patched
            already, ``"default"`` measures it with its patch, and every other method replaces the patch.
        tokenizer: the tokenizer of the model.
        methods: methods to compare; ``"default"`` is the model as it is. If a factor is left out, it follows from the
            longest length.
        spec: the spec of what is measured, or a suite made from one, which may have texts in memory.
        layer_types: layer types whose tables are patched; by default those that :func:`rope_patch.apply` chooses.
        freeze_at: length at which a dynamic table is frozen before anything is measured [tokens].
        resume: file (or mapping) in which finished windows and haystacks are stored: after Ctrl-C or a crash the same
            call continues where it stopped.

    Raises:
        ValueError: a method or task is wrong, or there is too little text; it is raised before anything is measured.

    Example:
        ``compare(model, tokenizer, ["default", "yarn"], EvalSpec(lengths=[4096, 16384]))``
    """
    suite = as_suite(spec, tokenizer)
    places = methods_in_place(model, methods, suite.spec.longest, layer_types=layer_types, freeze_at=freeze_at)
    work = open_work(model, resume)
    suite.mark_key_tokens(model, resume=work)
    rows = []
    for name, in_place in places.items():
        with in_place() as tables, progress.stage(name):
            rows.append(Row(name, suite.run(model, resume=work), tables))
    return comparison_of(model, suite, rows)


def comparison_of(model: nn.Module, suite: Suite, rows: Sequence[Row]) -> Comparison:
    """Return the comparison of rows that were measured on a suite.

    Args:
        model: the model as it was before any of the methods.
        suite: the windows and prompts that all rows were measured on.
        rows: the scores of the methods.
    """
    record = locate(model).record
    environment_values = environment(model)
    if record is not None:
        environment_values["patch before"] = str(record.to_method())
    return Comparison(
        rows=tuple(rows),
        spec=suite.spec,
        trained_length=trained_length(model),
        text=suite.text_sha256,
        text_name=suite.text_name,
        model=f"{type(model).__name__} {model_name(model)}".strip(),
        environment=environment_values,
    )


def methods_in_place(
    model: nn.Module, methods: Sequence[MethodLike], target_length: int, **options: Any
) -> dict[str, InPlace]:
    """Return by the string of each method what puts it into a model within a ``with`` block and gives its tables.

    A ValueError that is raised in the block names the method.

    Args:
        model: a causal language model. If it is patched already, ``"default"`` is its patch, which others replace.
        methods: the methods.
        target_length: the length that a factor which is left out follows from [tokens].
        **options: ``layer_types`` and ``freeze_at`` of :func:`rope_patch.apply`.

    Raises:
        ValueError: one of the methods does not fit, or two are the same.
    """
    if isinstance(methods, str) or not methods:
        raise ValueError(f"methods must be a list of one or more methods, got {methods!r}")
    resolved = [for_target(model, method, target_length, **options) for method in methods]
    names = [str(method) for method in resolved]
    # Rows and differences are found by the method string.
    if len(set(names)) < len(names):
        raise ValueError(f"methods must differ from each other, got {', '.join(names)}")
    location = locate(model)
    places: dict[str, InPlace] = {}
    request = PatchRequest(replace=location.record is not None, **options)
    for name, method in zip(names, resolved, strict=True):
        plan = None
        # The default of a patched model is the patch that it came with, so that nothing is put in its place.
        if not (request.replace and isinstance(method, Default)):
            plan = plan_patch(location, method, request)
        places[name] = partial(_in_place, name, location, plan)
    return places


@contextlib.contextmanager
def _in_place(name: str, location: Location, plan: PatchPlan | None) -> Iterator[tuple[RotaryTable, ...]]:
    """Put a plan into a model within a ``with`` block, and yield the tables in use; None leaves the model as it is."""
    with naming_method(name):
        if plan is None:
            yield inspect_model(location.model).tables
        else:
            with installed(location, plan) as patch:
                yield tuple(patch.after.values())


@contextlib.contextmanager
def naming_method(method: str) -> Iterator[None]:
    """Name the method in front of any ValueError that is raised within a ``with`` block."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{method}: {error}") from error
