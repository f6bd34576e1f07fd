"""Metrics: what is measured of a model, and how two results differ.

Tables, reports and verdicts loop over :data:`METRICS`, so a new metric appears in all of them.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import ClassVar, Literal, NamedTuple

from rope_patch.evaluation.intervals import CONFIDENCE, paired_means, paired_shares
from rope_patch.evaluation.perplexity.result import PerplexityResult
from rope_patch.evaluation.retrieval.measure import effective_prompts
from rope_patch.evaluation.suite import EvalResult
from rope_patch.evaluation.tasks import TASKS, members
from rope_patch.options.evaluation import EvalSpec
from rope_patch.registry import Registry
from rope_patch.runtime.number_format import number_text, percent, perplexity_text

VerdictKind = Literal["safe", "unsafe", "undecided"]

SAFE_LOST_SHARE = 0.02
"""Largest measured loss, as a share of the prompts, with which a change is still called safe."""

METRICS: Registry[Metric] = Registry("metric", "rope_patch.metrics", ("unit", "lower_is_better", "values"))
"""All metrics by name, in the order of their columns. A subclass of :class:`Metric` is registered when it is
defined."""


@dataclass(frozen=True)
class Span:
    """The range that a metric is measured over: positions in the text, or the prompts of one task and length.

    Attributes:
        stop: position after the last one, or the length of the prompts [tokens].
        start: first position [tokens]; None for prompts.
        task: task of the prompts; None for text.
    """

    stop: int
    start: int | None = None
    task: str | None = None

    def __str__(self) -> str:
        """Return the range of positions, or the length of the prompts [tokens]."""
        return str(self.stop) if self.start is None else f"{self.start}-{self.stop}"


class PairedDifference(NamedTuple):
    """The difference between two results on the same windows or prompts, with its interval.

    Attributes:
        estimate: first result minus the second.
        low: lower end of the interval.
        high: upper end of the interval.
    """

    estimate: float
    low: float
    high: float

    @property
    def significant(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0


class Metric(ABC):
    """A number that is measured of a model: the mean over windows or prompts, unless ``value`` is overridden.

    Attributes:
        name: key of the metric in :data:`METRICS` and in JSON.
        unit: unit of its differences.
        lower_is_better: whether a lower value is better.
        of_text: whether it is measured on windows of text, by position; otherwise it is measured on the prompts of
            every task, by length.
        is_perplexity: whether its values are perplexities; its differences are then those of the loss [nats/token].
        supporting: whether it only supports another one: no verdict on a cache format rests on it, and on prompts it is
            shown at the longest length alone.
        title: name of the metric in reports; by default ``name``.
        heading: name of the metric in headings of tables; by default ``name``.
        difference_name: name of its differences in JSON; by default ``name``.
    """

    name: ClassVar[str]
    unit: ClassVar[str]
    lower_is_better: ClassVar[bool]
    of_text: ClassVar[bool] = False
    is_perplexity: ClassVar[bool] = False
    supporting: ClassVar[bool] = False
    title: ClassVar[str]
    heading: ClassVar[str]
    difference_name: ClassVar[str]

    def __init_subclass__(cls, name: str) -> None:
        """Register the metric under its name.

        Raises:
            ValueError: another metric has this name.
        """
        cls.name = name
        for attribute in ("title", "heading", "difference_name"):
            # Looked up in the class alone: a subclass of a metric must not inherit the names of its parent.
            if attribute not in vars(cls):
                setattr(cls, attribute, name)
        METRICS.add(name, cls())

    @abstractmethod
    def values(self, result: EvalResult, span: Span) -> Sequence[float]:
        """Return the value of each window or prompt; those of two results of one spec are paired by their order."""

    def spans(self, spec: EvalSpec) -> list[Span]:
        """Return the spans of the columns: the positions between the lengths, or every task and length."""
        if self.of_text and spec.windows == 0:
            return []
        if self.of_text:
            return [Span(stop, start) for start, stop in itertools.pairwise([0, *spec.lengths])]
        lengths = spec.lengths[-1:] if self.supporting else spec.lengths
        return [Span(length, task=task) for task in spec.tasks for length in lengths]

    def value(self, result: EvalResult, span: Span) -> float:
        """Return the value that tables show."""
        return fmean(self.values(result, span))

    def difference(
        self, ours: EvalResult, theirs: EvalResult, span: Span, confidence: float = CONFIDENCE
    ) -> PairedDifference:
        """Return how one result differs from another: by default Student's interval over pairs of values."""
        a = self.values(ours, span)
        b = self.values(theirs, span)
        return PairedDifference(fmean(a) - fmean(b), *paired_means(a, b, confidence))

    def verdict(self, change: PairedDifference, tolerance: float) -> VerdictKind:
        """Return whether a change is harmless.

        By default a change is unsafe if it is significantly for the worse, and safe if its estimate is not for the
        worse.

        Args:
            change: difference from the model before the change.
            tolerance: relative rise of perplexity that is accepted.
        """
        if not self.lower_is_better:
            change = PairedDifference(-change.estimate, -change.high, -change.low)
        if change.low > 0:
            return "unsafe"
        if change.estimate <= 0:
            return "safe"
        return "undecided"


class Perplexity(Metric, name="perplexity"):
    """Perplexity of text by position. Its differences are those of the loss."""

    unit = "nats/token"
    lower_is_better = True
    of_text = is_perplexity = True
    title = "Perplexity"
    heading = "ppl"
    difference_name = "nll"

    def scores(self, result: EvalResult) -> PerplexityResult:
        """Return the losses that are measured."""
        if result.perplexity is None:
            raise ValueError("no window of text was measured: give windows >= 1")
        return result.perplexity

    def sums(self, result: EvalResult, span: Span) -> list[tuple[float, int]]:
        """Return the sum of the losses [nats] and the number of tokens of each window that has tokens there."""
        score = self.scores(result)
        inside = score.inside(span.start or 0, span.stop)
        sums = [(sum(one.nll[i] for i in inside), sum(one.tokens[i] for i in inside)) for one in score.documents]
        return [(nll, tokens) for nll, tokens in sums if tokens]

    def values(self, result: EvalResult, span: Span) -> list[float]:
        """Return the mean loss of each window that has tokens there [nats/token]."""
        return [nll / tokens for nll, tokens in self.sums(result, span)]

    def value(self, result: EvalResult, span: Span) -> float:
        """Return the perplexity over all tokens."""
        return self.scores(result).between(span.start or 0, span.stop)

    def verdict(self, change: PairedDifference, tolerance: float) -> VerdictKind:
        """Return safe if the whole interval is within the tolerance, and unsafe if it is beyond it, on either side."""
        limit = math.log1p(tolerance)
        if change.low > limit or change.high < -limit:
            return "unsafe"
        if -limit <= change.low and change.high <= limit:
            return "safe"
        return "undecided"


class KeyPerplexity(Perplexity, name="key_perplexity"):
    """Perplexity of the tokens that the unpatched model predicts well from the long context alone."""

    supporting = True
    title = "Perplexity of key tokens"
    heading = "key ppl"
    difference_name = "key_nll"

    def spans(self, spec: EvalSpec) -> list[Span]:
        """Return the positions between the lengths, beyond the short context; none if key tokens were not asked for."""
        if spec.short_context is None:
            return []
        return [span for span in super().spans(spec) if span.stop > spec.short_context]

    def difference(
        self, ours: EvalResult, theirs: EvalResult, span: Span, confidence: float = CONFIDENCE
    ) -> PairedDifference:
        """Return the difference over all key tokens; nan where no window has one.

        Windows have different numbers of them, so that a mean over windows would not be the change of the values. The
        interval is that of a ratio of two sums over windows.
        """
        pairs = zip(self.sums(ours, span), self.sums(theirs, span), strict=True)
        changes = [(nll - other, tokens) for (nll, tokens), (other, _) in pairs]
        if not changes:
            return PairedDifference(math.nan, math.nan, math.nan)
        mean_tokens = fmean(tokens for _, tokens in changes)
        estimate = fmean(change for change, _ in changes) / mean_tokens
        each = [estimate + (change - estimate * tokens) / mean_tokens for change, tokens in changes]
        return PairedDifference(estimate, *paired_means(each, [0.0] * len(each), confidence))

    def scores(self, result: EvalResult) -> PerplexityResult:
        """Return the losses of key tokens."""
        score = super().scores(result).key_tokens
        if score is None:
            raise ValueError("no key token was marked: give short_context")
        return score


class Retrieval(Metric, name="retrieval"):
    """Share of the prompts that are answered by an exact match."""

    unit = "share of prompts"
    lower_is_better = False
    title = "Retrieval"
    heading = ""  # the name of the task follows

    def values(self, result: EvalResult, span: Span) -> list[float]:
        """Return 1 for each prompt that is answered and 0 for each other one."""
        return [float(sample.correct) for sample in result.retrieval[str(span.task)].samples(span.stop)]

    def difference(
        self, ours: EvalResult, theirs: EvalResult, span: Span, confidence: float = CONFIDENCE
    ) -> PairedDifference:
        """Return the difference with Newcombe's interval, over the count of :func:`effective_prompts`."""
        a = self.values(ours, span)
        b = self.values(theirs, span)
        haystacks = [result.retrieval[str(span.task)].haystacks(span.stop) for result in (ours, theirs)]
        pairs = zip(*haystacks, strict=True)
        changes = [[x.correct - y.correct for x, y in zip(mine, others, strict=True)] for mine, others in pairs]
        # How much alike the prompts of a haystack are is estimated from their differences, because the interval is
        # about these.
        count = effective_prompts(str(span.task), changes, confidence)
        return PairedDifference((sum(a) - sum(b)) / len(a), *paired_shares(a, b, confidence, count=count))

    def verdict(self, change: PairedDifference, tolerance: float) -> VerdictKind:
        """Return unsafe if prompts are significantly lost, and safe if at most the share :data:`SAFE_LOST_SHARE` is."""
        if change.high < 0:
            return "unsafe"
        if change.estimate >= -SAFE_LOST_SHARE:
            return "safe"
        return "undecided"


class AnswerLogprob(Metric, name="logprob"):
    """Log-probability of the tokens of the right answer, whether the model gives it or not.

    It tells methods apart from far fewer prompts than exact matches do, also where no prompt is answered or all are
    (``benchmarks/results/separation.json``). A model that reads all text better gives right answers a higher one, too,
    so that it does not prove retrieval.
    """

    unit = "nats"
    lower_is_better = False
    supporting = True
    title = "Log-probability of the right answer"

    def values(self, result: EvalResult, span: Span) -> list[float]:
        """Return the mean over the prompts of each haystack [nats]; one prompt may ask for several values."""
        haystacks = result.retrieval[str(span.task)].haystacks(span.stop)
        prompts = 1 if TASKS[str(span.task)].joined else len(haystacks[0])
        return [math.fsum(sample.logprob for sample in haystack) / prompts for haystack in haystacks]


def spans_at(spec: EvalSpec, length: int) -> Iterator[tuple[Metric, Span]]:
    """Yield every metric that verdicts rest on, with its span at one length: all positions below it, or its prompts."""
    for metric in (one for one in METRICS.values() if not one.supporting):
        for span in metric.spans(spec):
            if span.stop == length:
                yield metric, replace(span, start=None if span.start is None else 0)


class MeanOfTasks(Metric, name="mean"):
    """Mean over the tasks of a suite of the share of right parts, where all of its tasks are asked."""

    unit = "share of prompts"
    lower_is_better = False
    supporting = True
    title = "Mean"
    heading = "mean of"

    def spans(self, spec: EvalSpec) -> list[Span]:
        """Return a span for each suite and length."""
        suites = dict.fromkeys(TASKS[task].suite for task in spec.tasks)
        whole = [suite for suite in suites if suite and set(members(suite)) <= set(spec.tasks)]
        return [Span(length, task=suite) for suite in whole for length in spec.lengths]

    def values(self, result: EvalResult, span: Span) -> list[float]:
        """Return the mean over the tasks of each number of a haystack: those of one number are drawn independently."""
        by_task = [result.retrieval[task].haystacks(span.stop) for task in members(str(span.task))]
        return [
            fmean(fmean(sample.correct for sample in haystack) for haystack in drawn)
            for drawn in zip(*by_task, strict=True)
        ]


# --- how metrics are written


def column_heading(metric: Metric, span: Span) -> str:
    """Return the heading of a column in a printed table, such as ``ppl 0-4096`` or ``passkey 4096``."""
    return " ".join(word for word in (metric.heading, span.task, str(span)) if word)


def value_text(metric: Metric, value: float) -> str:
    """Return a value as text for a table or a sentence; a dash for nan."""
    if metric.is_perplexity:
        return perplexity_text(value)
    return number_text(value)


def change_text(metric: Metric, value: float) -> str:
    """Return a difference, or an end of its interval, as text; one of the loss as a change of perplexity [%]."""
    if metric.is_perplexity:
        return percent(value)
    return number_text(value, sign=True)


def change_sentence(metric: Metric, change: PairedDifference) -> str:
    """Return a change with its interval as text."""
    estimate, low, high = (change_text(metric, value) for value in change)
    if math.isinf(change.high - change.low):
        unit = "window" if metric.of_text else "haystack"
        return f"{estimate} (no interval from one {unit})"
    return f"{estimate} ({low} to {high})"
