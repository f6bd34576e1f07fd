"""What is measured of a model, and how two results differ.

Tables, reports and verdicts go through :data:`METRICS`, so that a metric that is defined appears in all of them.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from rope_patch.evaluation.intervals import paired_means, paired_shares, ratio_of_sums
from rope_patch.evaluation.numbers import number_text, percent, perplexity_text, relative
from rope_patch.evaluation.retrieval import effective_prompts
from rope_patch.evaluation.suite import EvalResult
from rope_patch.evaluation.window_losses import PerplexityResult
from rope_patch.options.evaluation import EvalSpec
from rope_patch.registry import Registry

VerdictKind = Literal["safe", "unsafe", "undecided"]

SAFE_LOST_SHARE = 0.02
"""Share of prompts that a change may lose, as measured, and still be called safe."""

METRICS: Registry[Metric] = Registry("metric", "rope_patch.metrics", ("unit", "lower_is_better", "values"))
"""Every metric by name, in the order of their columns. A subclass of :class:`Metric` enters itself."""


@dataclass(frozen=True)
class Span:
    """What one value of a metric is measured over: positions of the text, or the prompts of a task and length.

    Attributes:
        stop: one past the last position, or the length of the prompts [tokens].
        start: first position [tokens]; None for prompts.
        task: of the prompts; None for text.
    """

    stop: int
    start: int | None = None
    task: str | None = None

    def __str__(self) -> str:
        """Return the positions or the length [tokens]."""
        return str(self.stop) if self.start is None else f"{self.start}-{self.stop}"


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
    """One number that is measured of a model: the mean of a value of each window or prompt, unless ``value`` differs.

    Attributes:
        name: key of :data:`METRICS`, and of results as JSON.
        unit: of its differences.
        lower_is_better: its direction.
        of_text: it is measured on windows of text, by position; otherwise on the prompts of every task, by length.
        is_perplexity: its values are perplexities, and its differences those of the loss [nats/token].
        title: what reports call it; its name by default.
        heading: what columns of a table are called; its name by default.
        difference_name: what differences are called in JSON; its name by default.
    """

    name: ClassVar[str]
    unit: ClassVar[str]
    lower_is_better: ClassVar[bool]
    of_text: ClassVar[bool] = False
    is_perplexity: ClassVar[bool] = False
    title: ClassVar[str]
    heading: ClassVar[str]
    difference_name: ClassVar[str]

    def __init_subclass__(cls, name: str) -> None:
        """Enter the metric under its name.

        Raises:
            ValueError: another metric has this name.
        """
        cls.name = name
        for attribute in ("title", "heading", "difference_name"):
            if attribute not in vars(cls):
                setattr(cls, attribute, name)
        METRICS.add(name, cls())

    def is_measured(self, spec: EvalSpec) -> bool:
        """Tell whether an evaluation measures it."""
        return not self.of_text or spec.windows != 0

    @abstractmethod
    def values(self, result: EvalResult, span: Span) -> Sequence[float]:
        """Return the value of each window or prompt; two results of one spec have the same ones."""

    def value(self, result: EvalResult, span: Span) -> float:
        """Return the value that is shown."""
        values = self.values(result, span)
        return math.fsum(values) / len(values)

    def difference(
        self, ours: EvalResult, theirs: EvalResult, span: Span, confidence: float = 0.95
    ) -> PairedDifference:
        """Return how one result differs from another: by default Student's interval over pairs of values."""
        a, b = self.values(ours, span), self.values(theirs, span)
        estimate = math.fsum(a) / len(a) - math.fsum(b) / len(b)
        return PairedDifference(estimate, *paired_means(a, b, confidence))

    def verdict(self, change: PairedDifference, tolerance: float) -> VerdictKind:
        """Return whether a change is harmless.

        By default one that is significantly for the worse is unsafe, and one that is not for the worse at all is safe.

        Args:
            change: the difference from what the model did before.
            tolerance: the rise of perplexity that is accepted, relative.
        """
        worse = change if self.lower_is_better else PairedDifference(-change.estimate, -change.high, -change.low)
        return "unsafe" if worse.low > 0 else "safe" if worse.estimate <= 0 else "undecided"


class Perplexity(Metric, name="perplexity"):
    """Perplexity of text by position; its differences are those of the loss."""

    unit, lower_is_better = "nats/token", True
    of_text = is_perplexity = True
    title, heading, difference_name = "Perplexity", "ppl", "nll"

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


class LongPerplexity(Perplexity, name="longppl"):
    """Perplexity over key tokens alone, those that need a long context; differences are those of their loss."""

    unit = "nats/key token"
    title, heading, difference_name = "LongPPL", "LongPPL", "key_nll"

    def is_measured(self, spec: EvalSpec) -> bool:
        """Tell whether an evaluation measures it."""
        return spec.longppl

    def values(self, result: EvalResult, span: Span) -> list[float]:
        """Return the mean loss over the key tokens of each window that has some [nats/token]."""
        return [nll / tokens for nll, tokens in _key_sums(result, span)]

    def value(self, result: EvalResult, span: Span) -> float:
        """Return the perplexity over all key tokens; nan where there are none."""
        sums = _key_sums(result, span)
        tokens = sum(count for _, count in sums)
        return 1 + relative(math.fsum(nll for nll, _ in sums) / tokens) if tokens else math.nan

    def difference(
        self, ours: EvalResult, theirs: EvalResult, span: Span, confidence: float = 0.95
    ) -> PairedDifference:
        """Return the difference of the mean loss, with the interval of a ratio: windows differ in their key tokens."""
        a, b = _key_sums(ours, span), _key_sums(theirs, span)
        differences = [mine - other for (mine, _), (other, _) in zip(a, b, strict=True)]
        return PairedDifference(*ratio_of_sums(differences, [tokens for _, tokens in a], confidence))


class Retrieval(Metric, name="retrieval"):
    """Share of the prompts that are answered exactly."""

    unit, lower_is_better = "share of prompts", False
    title, heading = "Retrieval", ""  # the task stands behind it

    def values(self, result: EvalResult, span: Span) -> list[float]:
        """Return 1 for each prompt that is answered, else 0."""
        return [float(sample.correct) for sample in result.retrieval[span.task or ""].samples(span.stop)]

    def difference(
        self, ours: EvalResult, theirs: EvalResult, span: Span, confidence: float = 0.95
    ) -> PairedDifference:
        """Return Newcombe's interval over as many independent prompts as the haystacks are worth."""
        task, length = span.task or "", span.stop
        a, b = ([sample.correct for sample in one.retrieval[task].samples(length)] for one in (ours, theirs))
        pairs = zip(ours.retrieval[task].haystacks(length), theirs.retrieval[task].haystacks(length), strict=True)
        changes = [
            [float(x.correct) - float(y.correct) for x, y in zip(mine, others, strict=True)] for mine, others in pairs
        ]
        count = effective_prompts(task, changes, confidence)
        return PairedDifference((sum(a) - sum(b)) / len(a), *paired_shares(a, b, confidence, count=count))

    def verdict(self, change: PairedDifference, tolerance: float) -> VerdictKind:
        """Return unsafe where prompts were significantly lost, safe where at most :data:`SAFE_LOST_SHARE` were."""
        return "unsafe" if change.high < 0 else "safe" if change.estimate >= -SAFE_LOST_SHARE else "undecided"


def spans_of(metric: Metric, spec: EvalSpec) -> list[Span]:
    """Return what a metric is measured over, its columns: positions between the lengths, or every task and length."""
    if not metric.is_measured(spec):
        return []
    if metric.of_text:
        return [Span(stop, start) for start, stop in itertools.pairwise([0, *spec.lengths])]
    return [Span(length, task=task) for task in spec.tasks for length in spec.lengths]


def spans_at(spec: EvalSpec, length: int) -> Iterator[tuple[Metric, Span]]:
    """Yield every metric with what tells how a model does at one length: all positions below it, or its prompts."""
    for metric in METRICS.values():
        if metric.of_text and metric.is_measured(spec):
            yield metric, Span(length, 0)
        else:
            yield from ((metric, span) for span in spans_of(metric, spec) if span.stop == length)


# --- how metrics are written


def column_heading(metric: Metric, span: Span) -> str:
    """Return the head of a column in a printed table, such as ``ppl 0-4096`` or ``passkey 4096``."""
    return " ".join(word for word in (metric.heading, span.task, str(span)) if word)


def value_text(metric: Metric, value: float) -> str:
    """Return a value for a table or a sentence; a dash where there is none."""
    return perplexity_text(value) if metric.is_perplexity else number_text(value)


def change_text(metric: Metric, value: float) -> str:
    """Return a difference, or an end of its interval: of the loss as one of perplexity [%]."""
    return percent(value) if metric.is_perplexity else number_text(value, sign=True)


def change_sentence(metric: Metric, change: PairedDifference) -> str:
    """Return a change with its interval."""
    estimate, low, high = (change_text(metric, value) for value in change)
    if math.isinf(change.high - change.low):
        return f"{estimate} (no interval from one {'window' if metric.of_text else 'prompt'})"
    return f"{estimate} ({low} to {high})"


def _text_of(result: EvalResult) -> PerplexityResult:
    if result.perplexity is None:
        raise ValueError("no window of text was measured: give windows >= 1")
    return result.perplexity


def _key_sums(result: EvalResult, span: Span) -> list[tuple[float, int]]:
    """Loss and number of the key tokens of each window that has some."""
    if result.key_tokens is None:
        raise ValueError("LongPPL was not measured: give longppl=True")
    score = _text_of(result)
    inside = score.inside(span.start or 0, span.stop)
    sums = [(math.fsum(d.key_nll[i] for i in inside), sum(d.key_tokens[i] for i in inside)) for d in score.documents]
    return [(nll, tokens) for nll, tokens in sums if tokens]
