"""Rows of a check of quantized caches, and verdicts on whether a format is safe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rope_patch.evaluation.metrics import VerdictKind, spans_at
from rope_patch.evaluation.suite import EvalResult
from rope_patch.kv_cache.formats import FULL_BITS
from rope_patch.kv_evaluation.attribution import Attribution
from rope_patch.options.kv_check import Limits
from rope_patch.tables import RotaryTable

NOISE = 0.1
"""Change of the loss beyond the tolerance that no noise explains, however few windows were read [nats/token].

In ``benchmarks/results/kv_study.json`` single windows of 1,024 tokens of the 140 cases that are safe on average lie at
most 0.06 above zero: three standard deviations above the mean of the case whose windows differ most."""


@dataclass(frozen=True)
class Divergence:
    """The change of the next token's distribution by a format.

    Attributes:
        kl: mean of KL(full precision ‖ quantized) [nats/token].
        top1: share of positions at which the most probable token is the same in both.
        tokens: number of positions that were compared.
    """

    kl: float
    top1: float
    tokens: int


@dataclass(frozen=True)
class Verdict:
    """A verdict on whether a format is safe at a length.

    Attributes:
        kind: ``"safe"``, ``"unsafe"``, or ``"undecided"`` if the intervals do not tell.
        idle: whether nothing was quantized, such as in a cache that fits into the residual window; the verdict is then
            undecided.
    """

    kind: VerdictKind
    idle: bool = False


@dataclass(frozen=True, eq=False)
class CheckRow:
    """The measurements of one format under one method.

    Attributes:
        method: the method string.
        format: the name of the format, as it was given.
        format_text: the format written out.
        scores: the perplexity by position, and the retrieval.
        tables: the rotary tables of the method, one for each layer type.
        divergences: the change of the next token's distribution at the positions below each length; empty for full
            precision itself.
        key_bits: effective bits per element of the quantized part of keys, mean over layers.
        value_bits: effective bits per element of the quantized part of values, mean over layers.
        cache_bits: bits per element of a whole cache, by its length. Sinks, the residual window and unfinished blocks
            are in full precision, and sliding layers hold only their window.
        attribution: the costs of the format's parts; None unless the format is unsafe at some length.
    """

    method: str
    format: str
    format_text: str
    scores: EvalResult
    tables: tuple[RotaryTable, ...]
    divergences: Mapping[int, Divergence]
    key_bits: float
    value_bits: float
    cache_bits: Mapping[int, float]
    attribution: Attribution | None = None

    @property
    def divergence(self) -> Divergence | None:
        """The change of the next token's distribution at all positions; None for full precision itself."""
        return self.divergences[max(self.divergences)] if self.divergences else None

    @property
    def bits(self) -> float:
        """Effective bits per element of the quantized part, mean of keys and values."""
        return (self.key_bits + self.value_bits) / 2


def verdict_of(row: CheckRow, base: CheckRow, length: int, limits: Limits) -> Verdict:
    """Return a verdict on a format from all metrics together.

    A format is unsafe if it is unsafe in one metric, and safe if it is safe in all of them. In perplexity it is unsafe
    if the whole interval of the change is beyond the tolerance, or the change is by more than :data:`NOISE` beyond it,
    which one window can show; it is safe if the whole interval is within the tolerance. A fall of perplexity counts as
    a rise does, since the format should change nothing. In retrieval it is unsafe if significantly fewer prompts are
    answered, and safe if at most :data:`~rope_patch.evaluation.metrics.SAFE_LOST_SHARE` of them were lost. It is unsafe
    if KL exceeds the limit (:attr:`~rope_patch.options.kv_check.Limits.loss`), whatever the rest says: KL compares
    whole distributions, so that neither the tokens of the text nor a fall of perplexity hide what changed.

    Args:
        row: the row of the format.
        base: the row of full precision under the same method.
        length: length of the prompts, below which positions of text count [tokens].
        limits: the limits of what a safe format may cost.
    """
    if row is base:
        return Verdict("safe")
    kinds: set[VerdictKind] = set()
    divergence = row.divergences[length]
    for metric, span in spans_at(row.scores.spec, length):
        moved = metric.difference(row.scores, base.scores, span)
        beyond_noise = metric.is_perplexity and abs(moved.estimate) > limits.loss + NOISE
        if beyond_noise:
            kinds.add("unsafe")
        else:
            kinds.add(metric.verdict(moved, limits.tolerance))
    # Where nothing is rounded, equal scores say nothing about the format.
    if "unsafe" not in kinds and row.cache_bits[length] == FULL_BITS:
        return Verdict("undecided", idle=True)
    if exceeds(divergence.kl, limits):
        kinds.add("unsafe")
    if "unsafe" in kinds:
        return Verdict("unsafe")
    if kinds == {"safe"}:
        return Verdict("safe")
    return Verdict("undecided")


def exceeds(kl: float, limits: Limits) -> bool:
    """Tell whether a KL is larger than the limits allow, or NaN."""
    return not kl <= limits.loss
