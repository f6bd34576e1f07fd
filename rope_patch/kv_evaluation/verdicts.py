"""Rows of a check of quantized caches, and whether a scheme is safe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from rope_patch.evaluation.metric import VerdictKind
from rope_patch.evaluation.metrics import METRICS, PairedDifference, spans_at
from rope_patch.evaluation.numbers import percent
from rope_patch.evaluation.suite import EvalResult
from rope_patch.kv_cache.schemes import FORMATS
from rope_patch.kv_evaluation.attribution import Attribution, attribute
from rope_patch.kv_evaluation.captions import listed
from rope_patch.kv_evaluation.errors import LayerErrors
from rope_patch.options.kv_check import Limits
from rope_patch.tables import RotaryTable


@dataclass(frozen=True)
class Divergence:
    """How far the distribution of the next token moves.

    Attributes:
        kl: mean of KL(full precision ‖ quantized) [nats/token].
        top1: share of positions at which both prefer the same token.
        tokens: compared.
    """

    kl: float
    top1: float
    tokens: int


@dataclass(frozen=True)
class Verdict:
    """Whether a scheme is safe for a method at a length.

    Attributes:
        method: as a method string.
        scheme: its name.
        length: positions looked at [tokens].
        kind: ``"safe"``, ``"unsafe"``, or ``"undecided"`` where the intervals do not tell.
        measured: the measurements, as text.
        layers: that the cost comes from, where it is unsafe.
        pairs: that it comes from.
        induced: share of those layers' squared logit error that lies in other pairs and goes when the pairs that are
            named, those of long mean keys, are kept in full precision; None where half of the error is in the pairs
            that are named.
        attribution: what parts of the scheme cost; None where that was not measured.
    """

    method: str
    scheme: str
    length: int
    kind: VerdictKind
    measured: str
    layers: tuple[int, ...] = ()
    pairs: tuple[int, ...] = ()
    induced: float | None = None
    attribution: Attribution | None = None

    @property
    def explanation(self) -> str:
        """Where the cost comes from, as text."""
        if self.attribution is not None and self.attribution.by_values:
            return f"values of {listed('layer', self.layers)}"
        places = f"{listed('layer', self.layers)}, {listed('pair', self.pairs)}"
        if self.attribution is not None and self.attribution.left is not None:
            places += f" ({percent(self.attribution.left)} with these in full precision)"
        if self.induced is not None:
            return f"{places}, whose long keys cost other pairs {self.induced:.0%} of the logit error"
        return places


@dataclass(frozen=True, eq=False)
class CheckRow:
    """One method under one scheme.

    Attributes:
        method: as a method string.
        scheme: its name, as it was given.
        scheme_text: the scheme written out.
        scores: perplexity by position and retrieval.
        tables: the rotary tables of the method, by layer type.
        divergence: from full precision; None for full precision itself.
        key_bits: effective bits per element of the part that is quantized, mean over layers.
        value_bits: of values.
        cache_bits: bits per element of a whole cache, by its length: sinks, residual window and unfinished blocks are
            in full precision, and layers that slide hold their window alone.
        errors: by layer; empty for full precision.
        attribution: what parts of it cost, where it is unsafe at some length; None elsewhere.
    """

    method: str
    scheme: str
    scheme_text: str
    scores: EvalResult
    tables: tuple[RotaryTable, ...]
    divergence: Divergence | None
    key_bits: float
    value_bits: float
    cache_bits: Mapping[int, float]
    errors: tuple[LayerErrors, ...]
    attribution: Attribution | None = None

    @property
    def bits(self) -> float:
        """Effective bits per element, mean of keys and values, of the part that is quantized."""
        return (self.key_bits + self.value_bits) / 2


def change(
    row: CheckRow, base: CheckRow, length: int, metric: str, confidence: float, task: str | None = None
) -> PairedDifference:
    """Return what a scheme changes in a metric beside full precision.

    Args:
        row: of the scheme.
        base: of full precision, under the same method.
        length: positions below it, or prompts of it [tokens].
        metric: key of :data:`~rope_patch.evaluation.metrics.METRICS`.
        confidence: of the interval.
        task: of retrieval; by default the first one of the spec.
    """
    spans = METRICS[metric].at(row.scores.spec, length)
    span = next(span for span in spans if task in (None, span.task))
    return METRICS[metric].difference(row.scores, base.scores, span, confidence)


def find_verdict(
    row: CheckRow, base: CheckRow, length: int, limits: Limits, long_pairs: Mapping[int, Tensor] | None = None
) -> Verdict:
    """Return whether a scheme is safe, as the metrics together say.

    Unsafe where one of them is; safe where all are. For perplexity: unsafe where the whole interval of its change lies
    above the tolerance, safe where it lies below. For retrieval: unsafe where significantly fewer prompts are answered,
    safe where at most :data:`~rope_patch.evaluation.metrics.LOST` of them were lost.

    Args:
        row: of the scheme.
        base: of full precision, under the same method.
        length: positions below it, and prompts of it [tokens].
        limits: what it may cost.
        long_pairs: pairs that may stretch the scale of others, from
            :func:`~rope_patch.kv_evaluation.attribution.longest_keys`.
    """
    if row is base:
        return Verdict(row.method, row.scheme, length, "safe", "full precision")
    kinds: set[VerdictKind] = set()
    parts = []
    for metric, span in spans_at(row.scores.spec, length):
        moved = metric.difference(row.scores, base.scores, span, limits.confidence)
        kinds.add(metric.verdict(moved, limits.tolerance))
        parts.append(f"{metric.label(row.scores.spec, span)} {metric.describe(moved)}")
    measured = ", ".join(parts)
    if "unsafe" in kinds:
        named = attribute(row.errors, long_pairs, row.attribution, limits.tolerance)
        return Verdict(row.method, row.scheme, length, "unsafe", measured, *named, row.attribution)
    if row.cache_bits[length] == FORMATS["none"]:
        return Verdict(row.method, row.scheme, length, "undecided", f"nothing is quantized at {length} tokens")
    return Verdict(row.method, row.scheme, length, "safe" if kinds == {"safe"} else "undecided", measured)
