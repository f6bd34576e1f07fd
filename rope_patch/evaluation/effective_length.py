"""The effective length, up to which a method does about as well as the unpatched model at its trained length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from rope_patch.evaluation.intervals import effective_count, paired_means, wilson
from rope_patch.evaluation.metrics import METRICS, Metric, Span, spans_of
from rope_patch.evaluation.suite import ANSWERED_SHARE, EvalResult

EFFECTIVE_RETRIEVAL = 0.9
"""Share of the unpatched model's retrieval at its trained length that a method must reach up to its effective
length."""

EFFECTIVE_PERPLEXITY = 1.05
"""Largest perplexity up to an effective length, as a multiple of the unpatched model's at its trained length."""

UNPATCHED = "default"
"""The method that leaves a model as it is."""


@dataclass(frozen=True)
class EffectiveLength:
    """The effective length of one method in one metric.

    Attributes:
        method: the method as a method string.
        metric: name of the metric, a key of :data:`~rope_patch.evaluation.metrics.METRICS`.
        length: longest measured length at which, and at all shorter ones, the metric is shown to hold [tokens]; None if
            that is not shown at the shortest one.
        next_length: next measured length [tokens]; None if the metric holds at all of them.
        fails: whether the metric is shown not to hold at ``next_length``; otherwise there are too few samples to tell.
    """

    method: str
    metric: str
    length: int | None
    next_length: int | None
    fails: bool

    def __str__(self) -> str:
        """Return the length as text, with what is known about the next one.

        >>> str(EffectiveLength("yarn:factor=4", "retrieval", 4096, 8192, fails=False))
        '4096 (8192 not shown)'
        """
        if self.next_length is None:
            return f"{self.length} or more"
        if self.length is None:
            return f"below {self.next_length}" if self.fails else f"not shown at {self.next_length}"
        return f"{self.length} ({self.next_length} {'too long' if self.fails else 'not shown'})"


@dataclass(frozen=True)
class EffectiveLengths:
    """The effective lengths of all methods in retrieval and perplexity.

    Retrieval holds at a length if, for every task, the lower end of its interval is above 90 % of the unpatched model's
    share at its trained length. Perplexity is measured at the positions between the previous length and this one, and
    holds if the upper end of its interval is below 105 % of the unpatched model's perplexity. Within the trained length
    that is the perplexity at the same positions, since text is harder to predict at its beginning; beyond it, the
    perplexity at the last positions within the trained length. RULER's effective length (Hsieh et al. 2024,
    arXiv:2404.06654) is a similar measure, against a fixed score and without intervals.

    Attributes:
        reference: longest measured length within the trained one [tokens].
        lengths: effective length of each method in each metric.
        confidence: confidence of the intervals.
        samples: number of haystacks of each length and task.
        depths: number of depths at which each haystack is asked.
        unanswered: tasks whose prompts of ``reference`` tokens the unpatched model answers too rarely for a comparison;
            if there is any, retrieval has no effective length.
    """

    reference: int
    lengths: tuple[EffectiveLength, ...]
    confidence: float
    samples: int
    depths: int
    unanswered: tuple[str, ...] = ()

    @property
    def explanation(self) -> str:
        """Sentences on what an effective length is, and on what to do if there are too few prompts."""
        sentence = (
            f"Effective length: up to it retrieval is above {EFFECTIVE_RETRIEVAL:.0%}, and perplexity below "
            f"{EFFECTIVE_PERPLEXITY:.0%}, of the unpatched model's at {self.reference} tokens, by the "
            f'{self.confidence:.0%} intervals at every length measured; "not shown" where these are too wide to tell.'
        )
        if self.unanswered:
            sentence += (
                f" Retrieval has none: the unpatched model answers fewer than {ANSWERED_SHARE:.0%} of the prompts of "
                f"{', '.join(self.unanswered)} at {self.reference} tokens."
            )
        # With fewer haystacks the interval is too wide even if every answer is right.
        needed = next(n for n in itertools.count(1) if self._lower_end(n) > EFFECTIVE_RETRIEVAL)
        if self.samples < needed and any(one.metric == "retrieval" and not one.fails for one in self.lengths):
            haystacks = "haystack" if self.samples == 1 else "haystacks"
            sentence += (
                f" With {self.samples} {haystacks} at each length no effective length of retrieval can be shown, even "
                f"if all prompts are answered: it takes at least {needed}."
            )
        return sentence

    def _lower_end(self, samples: int) -> float:
        """Return the lower end of the interval of retrieval if all prompts are answered."""
        count = effective_count([[1.0] * self.depths] * samples, self.confidence)
        return wilson(samples, samples, self.confidence, count=count)[0]

    def of(self, method: str) -> str:
        """Return the effective lengths of a method in each metric, as a part of a sentence."""
        return ", ".join(f"{one.metric} {one}" for one in self.lengths if one.method == method)


def effective_lengths(
    scores: Mapping[str, EvalResult], trained_length: int, confidence: float = 0.95
) -> EffectiveLengths | None:
    """Return the effective lengths of all methods; None without the unpatched model or a length within its trained one.

    Args:
        scores: results by method string, all of one spec; ``"default"`` is the unpatched model.
        trained_length: trained context length of the model [tokens].
        confidence: confidence of the intervals.
    """
    unpatched = scores.get(UNPATCHED)
    if unpatched is None:
        return None
    spec = unpatched.spec
    within = [length for length in spec.lengths if length <= trained_length]
    if not within:
        return None
    reference, retrieval = max(within), METRICS["retrieval"]
    spans = [span for span in spans_of(retrieval, spec) if span.stop == reference]
    unanswered = tuple(str(span.task) for span in spans if retrieval.value(unpatched, span) < ANSWERED_SHARE)
    # LongPPL has no effective length: few windows have key tokens at both lengths, so the two cannot be paired.
    metrics = [METRICS["perplexity"]] if spec.windows != 0 else []
    if spans and not unanswered:
        metrics.append(retrieval)
    lengths = [
        _effective(metric, method, result, unpatched, reference, confidence)
        for method, result in scores.items()
        for metric in metrics
    ]
    return EffectiveLengths(reference, tuple(lengths), confidence, spec.samples, len(spec.depths), unanswered)


def _effective(
    metric: Metric, method: str, result: EvalResult, unpatched: EvalResult, reference: int, confidence: float
) -> EffectiveLength:
    spans: dict[int, list[Span]] = {}
    for span in spans_of(metric, result.spec):
        spans.setdefault(span.stop, []).append(span)
    reached = None
    for length in result.spec.lengths:
        # Text is harder to predict at its beginning, so perplexity is compared at the same positions where there are
        # any.
        other = min(length, reference) if metric.of_text else reference
        holds = []
        for span, theirs in zip(spans[length], spans[other], strict=True):
            low, high, limit = _loss(metric, result, span, unpatched, theirs, confidence)
            # None where the interval contains the limit: the samples do not tell.
            holds.append(True if high < limit else False if low >= limit else None)
        if not all(holds):
            return EffectiveLength(method, metric.name, reached, length, fails=False in holds)
        reached = length
    return EffectiveLength(method, metric.name, reached, None, fails=False)


def _loss(
    metric: Metric, ours: EvalResult, span: Span, unpatched: EvalResult, theirs: Span, confidence: float
) -> tuple[float, float, float]:
    """Return the interval of the loss compared with the unpatched model, and the limit that it has to stay below.

    For perplexity it is the change of the model's loss, paired over windows [nats/token]. For retrieval it is the share
    of answered prompts with its sign changed, so that lower is better there too.
    """
    if metric.is_perplexity:
        low, high = paired_means(metric.values(ours, span), metric.values(unpatched, theirs), confidence)
        return low, high, math.log(EFFECTIVE_PERPLEXITY)
    low, high = ours.retrieval[str(span.task)].interval(span.stop, confidence)
    return -high, -low, -EFFECTIVE_RETRIEVAL * metric.value(unpatched, theirs)
