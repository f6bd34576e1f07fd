"""The metrics: of each its values, its direction, its paired difference and how it is written.

Tables, reports and verdicts go through :data:`METRICS`, so that a metric that is entered there appears in all of them.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from rope_patch.evaluation.intervals import paired_means, paired_shares
from rope_patch.evaluation.losses import PerplexityResult
from rope_patch.evaluation.retrieval import RetrievalResult, effective_prompts
from rope_patch.evaluation.spec import EvalSpec
from rope_patch.evaluation.suite import EvalResult

LOST = 0.02
"""Share of prompts that a change may lose, as measured, and still be called safe."""

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
        name: key of :data:`METRICS`, and of results as JSON.
        unit: of its differences.
        difference_name: what they are called in JSON; its name by default.
        lower_is_better: its direction.
    """

    name: ClassVar[str]
    unit: ClassVar[str]
    lower_is_better: ClassVar[bool]
    difference_name: ClassVar[str] = ""

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


class Perplexity(Metric):
    """Perplexity of text by position; its differences are those of the loss."""

    name = "perplexity"
    unit = "nats/token"
    difference_name = "nll"
    lower_is_better = True

    def spans(self, spec: EvalSpec) -> list[Span]:
        """Return the positions between the lengths."""
        if spec.windows == 0:
            return []
        return [Span(self.name, stop, start) for start, stop in itertools.pairwise([0, *spec.lengths])]

    def at(self, spec: EvalSpec, length: int) -> list[Span]:
        """Return the positions below the length."""
        return [Span(self.name, length, 0)] if spec.windows != 0 else []

    def values(self, result: EvalResult, span: Span) -> list[float]:
        """Return the mean loss of each window [nats/token]."""
        score = _text_of(result)
        inside = score.inside(span.start or 0, span.stop)
        return [sum(d.nll[i] for i in inside) / sum(d.tokens[i] for i in inside) for d in score.documents]

    def value(self, result: EvalResult, span: Span) -> float:
        """Return the perplexity over all tokens."""
        return _text_of(result).between(span.start or 0, span.stop)

    def verdict(self, change: PairedDifference, tolerance: float) -> VerdictKind:
        """Return safe where the whole interval lies below the tolerance, unsafe where it lies above."""
        limit = math.log1p(tolerance)
        return "unsafe" if change.low > limit else "safe" if change.high <= limit else "undecided"

    def heading(self, span: Span) -> str:
        """Return the head of a column in a printed table."""
        return f"ppl {span.start}-{span.stop}"

    def format(self, value: float) -> str:
        """Return a perplexity with one decimal."""
        return f"{value:.1f}"

    def format_long(self, value: float) -> str:
        """Return a perplexity with three or four digits that count."""
        return perplexity_text(value)

    def format_difference(self, value: float) -> str:
        """Return a difference of the loss [nats/token]."""
        return number_text(value, 4, sign=True)

    def relative_change(self, value: float) -> float:
        """Return a difference of the loss as one of perplexity, as a share of it."""
        return relative(value)

    def format_change(self, value: float) -> str:
        """Return a difference of the loss as one of perplexity [%]."""
        share = 100 * relative(value)
        digits = 2 if abs(share) < 10 else 1 if abs(share) < 1000 else 0
        return f"{number_text(share, digits, sign=True)} %"

    def estimate_text(self, change: PairedDifference) -> str:
        """Return a change of the loss as one of perplexity, relative."""
        return percent(change.estimate)

    def describe(self, change: PairedDifference) -> str:
        """Return a change of the loss as one of perplexity, relative, with its interval."""
        ends = f"{percent(change.low)} to {percent(change.high)}"
        known = math.isfinite(change.high - change.low)
        return f"{percent(change.estimate)} ({ends if known else 'no interval from one window'})"


class Retrieval(Metric):
    """Share of the prompts that are answered exactly."""

    name = "retrieval"
    unit = "share of prompts"
    lower_is_better = False

    def spans(self, spec: EvalSpec) -> list[Span]:
        """Return every task at every length."""
        return [Span(self.name, length, task=task) for task in spec.tasks for length in spec.lengths]

    def at(self, spec: EvalSpec, length: int) -> list[Span]:
        """Return every task at the length."""
        return [Span(self.name, length, task=task) for task in spec.tasks]

    def values(self, result: EvalResult, span: Span) -> list[float]:
        """Return 1 for each prompt that is answered, else 0."""
        return [float(sample.correct) for sample in _prompts_of(result, span).samples(span.stop)]

    def interval(self, result: EvalResult, span: Span, confidence: float) -> tuple[float, float]:
        """Return Wilson's interval over as many independent prompts as the haystacks are worth."""
        return _prompts_of(result, span).interval(span.stop, confidence)

    def difference(
        self, ours: EvalResult, theirs: EvalResult, span: Span, confidence: float = 0.95
    ) -> PairedDifference:
        """Return Newcombe's interval over as many independent prompts as the haystacks are worth."""
        one, other = _prompts_of(ours, span), _prompts_of(theirs, span)
        a = [sample.correct for sample in one.samples(span.stop)]
        b = [sample.correct for sample in other.samples(span.stop)]
        count = _independent(one, other, span.stop, confidence)
        return PairedDifference((sum(a) - sum(b)) / len(a), *paired_shares(a, b, confidence, count=count))

    def verdict(self, change: PairedDifference, tolerance: float) -> VerdictKind:
        """Return unsafe where prompts were significantly lost, safe where at most :data:`LOST` of them were."""
        return "unsafe" if change.high < 0 else "safe" if change.estimate >= -LOST else "undecided"

    def heading(self, span: Span) -> str:
        """Return the head of a column in a printed table."""
        return f"{span.task} {span.stop}"


METRICS: dict[str, Metric] = {metric.name: metric for metric in (Perplexity(), Retrieval())}
"""Every metric by name, in the order of their columns."""


def spans_at(spec: EvalSpec, length: int) -> Iterator[tuple[Metric, Span]]:
    """Yield every metric with what it is measured over at one length [tokens]."""
    for metric in METRICS.values():
        for span in metric.at(spec, length):
            yield metric, span


def _text_of(result: EvalResult) -> PerplexityResult:
    if result.perplexity is None:
        raise ValueError("no window of text was measured: give windows >= 1")
    return result.perplexity


def _prompts_of(result: EvalResult, span: Span) -> RetrievalResult:
    if span.task is None or span.task not in result.retrieval:
        raise ValueError(f"no task {span.task!r} was measured. Known: {', '.join(result.retrieval)}")
    return result.retrieval[span.task]


def _independent(one: RetrievalResult, other: RetrievalResult, length: int, confidence: float) -> float:
    """How many independent pairs of answers those at a length are worth."""
    haystacks = [
        [float(a.correct) - float(b.correct) for a, b in zip(mine, theirs, strict=True)]
        for mine, theirs in zip(one.haystacks(length), other.haystacks(length), strict=True)
    ]
    return effective_prompts(one.task, haystacks, confidence)


# --- numbers as text --------------------------------------------------------------------------------------------------


def relative(nats: float) -> float:
    """Return a change of perplexity as a share of it, from one of the loss [nats/token]."""
    return math.expm1(nats) if nats < 700 else math.inf


def percent(nats: float) -> str:
    """Return a change of the loss as one of perplexity.

    >>> percent(math.log(1.5)), percent(20.0)
    ('+50.0%', 'over +1000%')
    """
    share = relative(nats)
    return f"{share:+.1%}" if share < 10 else "over +1000%"


def perplexity_text(value: float) -> str:
    """Return a perplexity with three or four digits that count."""
    if not math.isfinite(value):
        return number_text(value)
    return f"{value:.{2 if value < 100 else 1 if value < 1000 else 0}f}" if value < 1e6 else f"{value:.2e}"


def number_text(value: float, digits: int = 2, *, sign: bool = False) -> str:
    """Return a number for people: a true minus, ∞ where there is no end, a dash where there is no value."""
    if math.isnan(value):
        return "–"
    text = f"{value:{'+' if sign else ''}z.{digits}f}".replace("inf", "∞")
    return text.replace("-", "−")
