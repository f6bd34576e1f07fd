"""What a metric is: its values, its direction, its paired difference and how it is written."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from rope_patch.evaluation.intervals import paired_means
from rope_patch.evaluation.numbers import number_text
from rope_patch.evaluation.suite import EvalResult
from rope_patch.options.evaluation import EvalSpec

VerdictKind = Literal["safe", "unsafe", "undecided"]


@dataclass(frozen=True)
class Span:
    """What one value of a metric is measured over.

    Attributes:
        metric: its name.
        stop: one past the last position, or the length of the prompts [tokens].
        start: first position [tokens]; None for prompts.
        task: of the prompts; None for text.
    """

    metric: str
    stop: int
    start: int | None = None
    task: str | None = None


class PairedDifference(NamedTuple):
    """A difference between two results of the same windows or prompts, with its interval.

    Attributes:
        estimate: the one minus the other.
        low: lower end of the interval.
        high: upper end.
    """

    estimate: float
    low: float
    high: float

    @property
    def significant(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0


class Metric(ABC):
    """One number that is measured of a model.

    Attributes:
        name: key of :data:`~rope_patch.evaluation.metrics.METRICS`, and of results as JSON.
        unit: of its differences.
        difference_name: what they are called in JSON; its name by default.
        lower_is_better: its direction.
        by_position: its values are of positions in a text, which differ in how hard they are.
    """

    name: ClassVar[str]
    unit: ClassVar[str]
    lower_is_better: ClassVar[bool]
    difference_name: ClassVar[str] = ""
    by_position: ClassVar[bool] = False

    @abstractmethod
    def spans(self, spec: EvalSpec) -> list[Span]:
        """Return what a comparison shows of it: its columns."""

    @abstractmethod
    def at(self, spec: EvalSpec, length: int) -> list[Span]:
        """Return what tells how a model does at one length [tokens]."""

    @abstractmethod
    def values(self, result: EvalResult, span: Span) -> Sequence[float]:
        """Return the value of each unit, a window or a prompt; two results of one spec have the same units."""

    def value(self, result: EvalResult, span: Span) -> float:
        """Return the value that is shown: by default the mean over the units."""
        values = self.values(result, span)
        return math.fsum(values) / len(values)

    def interval(self, result: EvalResult, span: Span, confidence: float) -> tuple[float, float] | None:
        """Return an interval of the value itself; None where the metric has none."""
        return None

    def difference(
        self, ours: EvalResult, theirs: EvalResult, span: Span, confidence: float = 0.95
    ) -> PairedDifference:
        """Return how one result differs from another: by default Student's interval over the paired units."""
        a, b = self.values(ours, span), self.values(theirs, span)
        estimate = math.fsum(a) / len(a) - math.fsum(b) / len(b)
        return PairedDifference(estimate, *paired_means(a, b, confidence))

    def verdict(self, change: PairedDifference, tolerance: float) -> VerdictKind:
        """Return whether a change is harmless.

        By default one that is significantly for the worse is unsafe, and one that is not for the worse at all is safe.

        Args:
            change: from what the model did before.
            tolerance: rise of perplexity that is accepted, relative.
        """
        worse = change if self.lower_is_better else PairedDifference(-change.estimate, -change.high, -change.low)
        return "unsafe" if worse.low > 0 else "safe" if worse.estimate <= 0 else "undecided"

    def held(self, spec: EvalSpec, reference: EvalResult, length: int) -> bool:
        """Tell whether the metric has an effective length; by default it has none.

        Args:
            spec: of the results.
            reference: the scores of the unpatched model.
            length: within its trained length, that other lengths are compared with [tokens].
        """
        return False

    def holds(
        self, ours: EvalResult, span: Span, reference: EvalResult, reference_span: Span, confidence: float
    ) -> bool | None:
        """Tell whether a model does nearly as well as the unpatched one within its trained length; None if unknown.

        Args:
            ours: the scores of the model.
            span: the length in question.
            reference: the scores of the unpatched model.
            reference_span: the length within its trained one.
            confidence: of the interval.
        """
        raise NotImplementedError(f"{self.name} has no effective length")

    def heading(self, span: Span) -> str:
        """Return the head of a column in a printed table."""
        return f"{self.name} {self.span_text(span)}"

    def title(self, span: Span, *, of_differences: bool = False) -> str:
        """Return what stands above neighbouring columns in a report.

        Args:
            span: of one of them.
            of_differences: the columns hold differences.
        """
        of = f", {span.task}," if span.task else ""
        return f"{self.name.capitalize()}{of} at {'length' if span.start is None else 'positions'} [tokens]" + (
            f", {self.unit}" if of_differences else ""
        )

    def span_text(self, span: Span) -> str:
        """Return positions or length as text [tokens]."""
        return str(span.stop) if span.start is None else f"{span.start}–{span.stop}"

    def format(self, value: float) -> str:
        """Return a value for a printed table."""
        return f"{value:.2f}"

    def format_long(self, value: float) -> str:
        """Return a value for a report."""
        return number_text(value)

    def format_difference(self, value: float) -> str:
        """Return a difference, or an end of its interval, with its sign."""
        return number_text(value, 2, sign=True)

    def relative_change(self, value: float) -> float:
        """Return a difference, or an end of its interval, as tables state it: by default as it is."""
        return value

    def format_change(self, value: float) -> str:
        """Return what :meth:`relative_change` gives, for a report."""
        return number_text(value, 2, sign=True)

    def label(self, spec: EvalSpec, span: Span) -> str:
        """Return its name, with the task where a spec has several."""
        return f"{self.name} of {span.task}" if span.task and len(spec.tasks) > 1 else self.name

    def estimate_text(self, change: PairedDifference) -> str:
        """Return the estimate of a change for a sentence."""
        return f"{change.estimate:+.2f}"

    def describe(self, change: PairedDifference) -> str:
        """Return a change for a sentence, with its interval."""
        return f"{change.estimate:+.2f} ({change.low:+.2f} to {change.high:+.2f})"
