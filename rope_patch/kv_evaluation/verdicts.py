"""Rows of a check of quantized caches, and whether a scheme is safe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rope_patch.evaluation.metrics import Metric, Span, VerdictKind, change_sentence, spans_at
from rope_patch.evaluation.suite import EvalResult
from rope_patch.kv_cache.formats import FULL_BITS
from rope_patch.kv_evaluation.attention_errors import LayerErrors
from rope_patch.kv_evaluation.attribution import Attribution
from rope_patch.options.evaluation import EvalSpec
from rope_patch.options.kv_check import Limits
from rope_patch.tables import RotaryTable


@dataclass(frozen=True)
class Divergence:
    """How far the distribution of the next token moves.

    Attributes:
        kl: mean of KL(full precision ‖ quantized) [nats/token].
        top1: share of positions at which both prefer the same token.
        tokens: how many positions were compared.
    """

    kl: float
    top1: float
    tokens: int


@dataclass(frozen=True)
class Verdict:
    """Whether a scheme is safe at a length.

    Attributes:
        kind: ``"safe"``, ``"unsafe"``, or ``"undecided"`` where the intervals do not tell.
        measured: the measurements, as text.
        idle: whether nothing was rounded, such as in a cache that the residual window holds; it is undecided then.
    """

    kind: VerdictKind
    measured: str
    idle: bool = False


@dataclass(frozen=True, eq=False)
class CheckRow:
    """One method under one scheme.

    Attributes:
        method: the method string.
        scheme: the name of the scheme, as it was given.
        scheme_text: the scheme written out.
        scores: the perplexity by position, and retrieval.
        tables: the rotary tables of the method, by layer type.
        divergence: how far the row is from full precision; None for full precision itself.
        key_bits: effective bits per element of the part that is quantized, mean over layers.
        value_bits: the same of values.
        cache_bits: bits per element of a whole cache, by its length: sinks, residual window and unfinished blocks are
            in full precision, and layers that slide hold their window alone.
        errors: what the scheme does to the logits, by layer; empty for full precision.
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


def verdict_of(row: CheckRow, base: CheckRow, length: int, limits: Limits) -> Verdict:
    """Return whether a scheme is safe, as the metrics together say.

    Unsafe where one of them is; safe where all are. For perplexity: unsafe where the whole interval of its change lies
    above the tolerance, safe where it lies below. For retrieval: unsafe where significantly fewer prompts are answered,
    safe where at most :data:`~rope_patch.evaluation.metrics.SAFE_LOST_SHARE` of them were lost.

    Args:
        row: the row of the scheme.
        base: the row of full precision under the same method.
        length: the verdict is on positions below it, and on prompts of it [tokens].
        limits: what the scheme may cost.
    """
    if row is base:
        return Verdict("safe", "full precision")
    kinds: set[VerdictKind] = set()
    parts = []
    for metric, span in spans_at(row.scores.spec, length):
        moved = metric.difference(row.scores, base.scores, span, limits.confidence)
        kinds.add(metric.verdict(moved, limits.tolerance))
        parts.append(f"{label(metric, row.scores.spec, span)} {change_sentence(metric, moved)}")
    if "unsafe" not in kinds and row.cache_bits[length] == FULL_BITS:
        return Verdict("undecided", f"nothing is quantized at {length} tokens", idle=True)
    kind: VerdictKind = "unsafe" if "unsafe" in kinds else "safe" if kinds == {"safe"} else "undecided"
    return Verdict(kind, ", ".join(parts))


def label(metric: Metric, spec: EvalSpec, span: Span) -> str:
    """Return the name of a metric, with the task where a spec has several."""
    return f"{metric.name} of {span.task}" if span.task and len(spec.tasks) > 1 else metric.name
