"""The effective length: up to which length a method does as well as the unpatched model at its trained length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from rope_patch.evaluation.intervals import effective_count, paired_means, wilson
from rope_patch.evaluation.metrics import METRICS, Metric, Span, spans_of
from rope_patch.evaluation.suite import ANSWERED_SHARE, EvalResult

EFFECTIVE_RETRIEVAL = 0.9
"""Share of what the unpatched model answers at its trained length that a method must answer at its effective length."""

EFFECTIVE_PERPLEXITY = 1.05
"""The perplexity at an effective length, as a multiple of the unpatched model's at its trained length, at most."""

UNPATCHED = "default"
"""The method that leaves a model as it is."""


@dataclass(frozen=True)
class EffectiveLength:
    """Up to which length one metric of a method holds.

    Attributes:
        method: as a method string.
        metric: a key of :data:`~rope_patch.evaluation.metrics.METRICS`.
        length: the longest measured length at which, and at all shorter ones, the metric is shown to hold; None where
            it is not shown at the shortest one [tokens].
        next_length: the next measured length; None where the metric holds at all of them [tokens].
        fails: at ``next_length`` the metric is shown not to hold; otherwise the samples do not suffice to tell.
    """

    method: str
    metric: str
    length: int | None
    next_length: int | None
    fails: bool

    def __str__(self) -> str:
        """Return the length as text, with what is known of the next one.

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
    """The effective length of every method in every metric that has one: retrieval and perplexity.

    A method holds at a length if the lower end of the interval of its retrieval lies above 90 % of what the unpatched
    model answers at its trained length, for every task; and if the upper end of that of its perplexity, at positions
    from the length before, lies below 105 % of the unpatched model's: at the same positions within the trained length,
    since text is harder to predict at its beginning, and beyond it at the last positions within. RULER's effective
    length (Hsieh et al. 2024, arXiv:2404.06654) is a similar measure, against a fixed score and without intervals.

    Attributes:
        reference: the longest measured length within the trained one [tokens].
        lengths: by method and metric.
        confidence: of the intervals.
        samples: haystacks of each length and task.
        depths: how many depths each was asked at.
        unanswered: tasks whose prompts of ``reference`` tokens the unpatched model answers too seldom to compare with;
            where there is one, retrieval has no effective length.
    """

    reference: int
    lengths: tuple[EffectiveLength, ...]
    confidence: float
    samples: int
    depths: int
    unanswered: tuple[str, ...] = ()

    @property
    def explanation(self) -> str:
        """What an effective length is, and what to do where the prompts do not suffice, as sentences."""
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
        needed = next(n for n in itertools.count(1) if self._lower_end(n) > EFFECTIVE_RETRIEVAL)
        if self.samples < needed and any(one.metric == "retrieval" and not one.fails for one in self.lengths):
            haystacks = "haystack" if self.samples == 1 else "haystacks"
            sentence += (
                f" With {self.samples} {haystacks} at each length no effective length of retrieval can be shown, even "
                f"if all prompts are answered: it takes at least {needed} haystacks (samples={needed}, --samples "
                f"{needed})."
            )
        return sentence

    def _lower_end(self, samples: int) -> float:
        """Return the lower end of the interval of retrieval where all prompts are answered."""
        count = effective_count([[1.0] * self.depths] * samples, self.confidence)
        return wilson(samples, samples, self.confidence, count=count)[0]

    def of(self, method: str) -> str:
        """Return the effective lengths of a method, a metric each, for a sentence."""
        return ", ".join(f"{one.metric} {one}" for one in self.lengths if one.method == method)


def effective_lengths(
    scores: Mapping[str, EvalResult], trained_length: int, confidence: float = 0.95
) -> EffectiveLengths | None:
    """Return the effective length of every method; None without the unpatched model or a length it was trained at.

    Args:
        scores: by method string, of one spec; that of the unpatched model is ``"default"``.
        trained_length: of the model [tokens].
        confidence: of the intervals.
    """
    unpatched = scores.get(UNPATCHED)
    if unpatched is None:
        return None
    spec = unpatched.spec
    within = [length for length in spec.lengths if length <= trained_length]
    if not within:
        return None
    reference, retrieval = max(within), METRICS["retrieval"]
    asked = [span for span in spans_of(retrieval, spec) if span.stop == reference]
    unanswered = tuple(str(span.task) for span in asked if retrieval.value(unpatched, span) < ANSWERED_SHARE)
    # LongPPL has no effective length: few windows have key tokens at two lengths, so that these cannot be paired.
    metrics = [METRICS["perplexity"]] if spec.windows != 0 else []
    if not unanswered:
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
        other = min(length, reference) if metric.of_text else reference
        holds = []
        for span, theirs in zip(spans[length], spans[other], strict=True):
            low, high, limit = _loss(metric, result, span, unpatched, theirs, confidence)
            holds.append(True if high < limit else False if low >= limit else None)
        if not all(holds):
            return EffectiveLength(method, metric.name, reached, length, fails=False in holds)
        reached = length
    return EffectiveLength(method, metric.name, reached, None, fails=False)


def _loss(
    metric: Metric, ours: EvalResult, span: Span, unpatched: EvalResult, theirs: Span, confidence: float
) -> tuple[float, float, float]:
    """Return the interval of what is lost against the unpatched model, and what may be lost.

    For perplexity that is a change of the loss, paired over windows [nats/token]; for retrieval the share of prompts
    that are answered, with its sign changed.
    """
    if metric.is_perplexity:
        low, high = paired_means(metric.values(ours, span), metric.values(unpatched, theirs), confidence)
        return low, high, math.log(EFFECTIVE_PERPLEXITY)
    low, high = ours.retrieval[str(span.task)].interval(span.stop, confidence)
    return -high, -low, -EFFECTIVE_RETRIEVAL * metric.value(unpatched, theirs)
