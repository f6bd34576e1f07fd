"""The metrics that are measured of a model.

Tables, reports and verdicts go through :data:`METRICS`, so that a metric that is entered there appears in all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from rope_patch.evaluation.intervals import paired_means, paired_shares, ratio_of_sums
from rope_patch.evaluation.losses import PerplexityResult
from rope_patch.evaluation.metric import Metric, PairedDifference, Span, VerdictKind
from rope_patch.evaluation.numbers import number_text, percent, perplexity_text, relative
from rope_patch.evaluation.retrieval import RetrievalResult, effective_prompts
from rope_patch.evaluation.suite import ANSWERED, EvalResult
from rope_patch.options.evaluation import EvalSpec
from rope_patch.registry import Registry

__all__ = [
    "LOST",
    "METRICS",
    "LongPerplexity",
    "Metric",
    "PairedDifference",
    "Perplexity",
    "Retrieval",
    "Span",
    "spans_at",
]

LOST = 0.02
"""Share of prompts that a change may lose, as measured, and still be called safe."""

EFFECTIVE_RETRIEVAL = 0.9
"""Share of what the unpatched model answers at its trained length that a method must answer at its effective length."""

EFFECTIVE_PERPLEXITY = 1.05
"""The perplexity at an effective length, as a multiple of the unpatched model's at its trained length, at most."""


class Perplexity(Metric):
    """Perplexity of text by position; its differences are those of the loss."""

    name = "perplexity"
    unit = "nats/token"
    difference_name = "nll"
    lower_is_better = True
    by_position = True

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

    def held(self, spec: EvalSpec, reference: EvalResult, length: int) -> bool:
        """Tell whether windows of text were read."""
        return spec.windows != 0

    def holds(
        self, ours: EvalResult, span: Span, reference: EvalResult, reference_span: Span, confidence: float
    ) -> bool | None:
        """Tell whether the interval of the change of perplexity, paired over windows, lies below 5 %."""
        one, other = self.values(ours, span), self.values(reference, reference_span)
        low, high = paired_means(one, other, confidence)
        limit = math.log(EFFECTIVE_PERPLEXITY)
        return True if high < limit else False if low >= limit else None

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


class LongPerplexity(Perplexity):
    """Perplexity over key tokens alone, those that need a long context; differences are those of their loss."""

    name = "longppl"
    unit = "nats/key token"
    difference_name = "key_nll"

    def spans(self, spec: EvalSpec) -> list[Span]:
        """Return the positions between the lengths, where it is measured."""
        return super().spans(spec) if spec.longppl else []

    def held(self, spec: EvalSpec, reference: EvalResult, length: int) -> bool:
        """Return False: few windows have key tokens at two lengths, so that these cannot be compared in pairs."""
        return False

    def at(self, spec: EvalSpec, length: int) -> list[Span]:
        """Return the positions below the length, where it is measured."""
        return super().at(spec, length) if spec.longppl else []

    def values(self, result: EvalResult, span: Span) -> list[float]:
        """Return the mean loss over the key tokens of each window that has some [nats/token]."""
        return [nll / tokens for nll, tokens in self._sums(result, span)]

    def value(self, result: EvalResult, span: Span) -> float:
        """Return the perplexity over all key tokens; nan where there are none."""
        sums = self._sums(result, span)
        tokens = sum(count for _, count in sums)
        return 1 + relative(math.fsum(nll for nll, _ in sums) / tokens) if tokens else math.nan

    def difference(
        self, ours: EvalResult, theirs: EvalResult, span: Span, confidence: float = 0.95
    ) -> PairedDifference:
        """Return the difference of the mean loss, with the interval of a ratio: windows differ in their key tokens."""
        a, b = self._sums(ours, span), self._sums(theirs, span)
        differences = [mine - other for (mine, _), (other, _) in zip(a, b, strict=True)]
        return PairedDifference(*ratio_of_sums(differences, [tokens for _, tokens in a], confidence))

    def heading(self, span: Span) -> str:
        """Return the head of a column in a printed table."""
        return f"LongPPL {span.start}-{span.stop}"

    def format(self, value: float) -> str:
        """Return a perplexity with one decimal, a dash where no key token is."""
        return "–" if math.isnan(value) else super().format(value)

    def title(self, span: Span, *, of_differences: bool = False) -> str:
        """Return what stands above neighbouring columns in a report."""
        return f"LongPPL at positions [tokens]{f', {self.unit}' if of_differences else ''}"

    def _sums(self, result: EvalResult, span: Span) -> list[tuple[float, int]]:
        """Loss and number of the key tokens of each window that has some."""
        if result.key_tokens is None:
            raise ValueError("LongPPL was not measured: give longppl=True")
        score = _text_of(result)
        inside = score.inside(span.start or 0, span.stop)
        sums = [
            (math.fsum(d.key_nll[i] for i in inside), sum(d.key_tokens[i] for i in inside)) for d in score.documents
        ]
        return [(nll, tokens) for nll, tokens in sums if tokens]


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

    def held(self, spec: EvalSpec, reference: EvalResult, length: int) -> bool:
        """Tell whether the unpatched model answers each task at the length, so that a share of that says something."""
        return all(self.value(reference, span) >= ANSWERED for span in self.at(spec, length))

    def holds(
        self, ours: EvalResult, span: Span, reference: EvalResult, reference_span: Span, confidence: float
    ) -> bool | None:
        """Tell whether the interval of the share answered lies above 90 % of what the unpatched model answers."""
        low, high = self.interval(ours, span, confidence)
        limit = EFFECTIVE_RETRIEVAL * self.value(reference, reference_span)
        return True if low > limit else False if high <= limit else None

    def verdict(self, change: PairedDifference, tolerance: float) -> VerdictKind:
        """Return unsafe where prompts were significantly lost, safe where at most :data:`LOST` of them were."""
        return "unsafe" if change.high < 0 else "safe" if change.estimate >= -LOST else "undecided"

    def heading(self, span: Span) -> str:
        """Return the head of a column in a printed table."""
        return f"{span.task} {span.stop}"


METRICS: Registry[Metric] = Registry("metric", "rope_patch.metrics")
"""Every metric by name, in the order of their columns."""
METRICS.update({metric.name: metric for metric in (Perplexity(), LongPerplexity(), Retrieval())})


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
