"""Rows of a check of quantized caches: whether a scheme is safe, and what is to blame if not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rope_patch.analysis.outliers import RATIO
from rope_patch.evaluation.compare import Row, difference
from rope_patch.kv_cache.schemes import FORMATS
from rope_patch.kv_evaluation.errors import LayerErrors
from rope_patch.modeling.statistics import Capture

LOST = 0.02
"""Share of prompts that a safe scheme may lose, as measured."""
BLAMED = 2 / 3
"""Of the worst layer's harm: layers with at least so much are named."""


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
class Attribution:
    """What parts of a scheme cost on the compared windows, each the rise of the loss over full precision [nats/token].

    Attributes:
        whole: the scheme.
        keys: its keys alone, values in full precision.
        values: its values alone.
        layers: each layer alone, all others in full precision.
        left: the scheme, but for the pairs to blame in the layers to blame; None where no pair is.
    """

    whole: float
    keys: float
    values: float
    layers: Mapping[int, float]
    left: float | None = None

    @property
    def by_values(self) -> bool:
        """Whether values cost more than keys."""
        return self.values > self.keys


@dataclass(frozen=True)
class Verdict:
    """Whether a scheme is safe for a method at a length.

    Attributes:
        method: in the grammar.
        scheme: its name.
        length: positions looked at [tokens].
        kind: ``"safe"``, ``"unsafe"``, or ``"undecided"`` where the intervals do not tell.
        measured: what was.
        layers: to blame, where it is unsafe.
        pairs: to blame.
        induced: share of those layers' squared logit error that lies in other pairs and goes when the pairs to blame,
            those of long mean keys, are kept in full precision; None where half of the error is in the pairs to blame.
        attribution: what parts of the scheme cost; None where that was not measured.
    """

    method: str
    scheme: str
    length: int
    kind: str
    measured: str
    layers: tuple[int, ...] = ()
    pairs: tuple[int, ...] = ()
    induced: float | None = None
    attribution: Attribution | None = None

    @property
    def cause(self) -> str:
        """What is to blame, in words."""
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
        method: in the grammar.
        scheme: its name, as it was given.
        scheme_text: its text.
        scores: perplexity by position and retrieval.
        divergence: from full precision; None for full precision itself.
        key_bits: effective bits per element of the part that is quantized, mean over layers.
        value_bits: of values.
        cache_bits: bits per element of a whole cache, by its length: sinks, residual window and unfinished blocks are
            in full precision, and layers that slide hold their window alone.
        errors: by layer; empty for full precision.
        prediction: Spearman's rank correlation over all pairs of all heads: of a pair's logit error with its mean key's
            radius times its mean query norm, and with lying under the frequency bound; None where nothing varies.
        mitigation_of: the unsafe scheme that this one was tried for, or None.
        attribution: what parts of it cost, where it is unsafe at some length; None elsewhere, and of mitigations.
    """

    method: str
    scheme: str
    scheme_text: str
    scores: Row
    divergence: Divergence | None
    key_bits: float
    value_bits: float
    cache_bits: Mapping[int, float]
    errors: tuple[LayerErrors, ...]
    prediction: tuple[float | None, float | None]
    mitigation_of: str | None = None
    attribution: Attribution | None = None

    @property
    def bits(self) -> float:
        """Effective bits per element, mean of keys and values, of the part that is quantized."""
        return (self.key_bits + self.value_bits) / 2


# --- judging ---------------------------------------------------------------------------------------------------------


def change(row: CheckRow, base: CheckRow, length: int, kind: str, confidence: float) -> tuple[float, float, float]:
    """Return what a scheme changes, as :meth:`KVCheck.change`, beside full precision."""
    found = difference(row.scores, base.scores, kind, 0, length, confidence)
    return found.estimate, found.low, found.high


def judge(
    row: CheckRow,
    base: CheckRow,
    length: int,
    tolerance: float,
    confidence: float,
    marked: Mapping[int, Tensor] | None = None,
) -> Verdict:
    """Return whether a scheme is safe.

    Unsafe: the whole interval of perplexity's change lies above the tolerance, or that of retrieval's below zero.
    Safe: the former lies below the tolerance, and no more prompts were lost than :data:`LOST`.

    Args:
        row: of the scheme.
        base: of full precision, under the same method.
        length: positions below it, and prompts of it [tokens].
        tolerance: rise of perplexity that a safe scheme may cost, relative.
        confidence: of the intervals.
        marked: pairs that may stretch the scale of others, from :func:`longest_keys`.
    """
    if row is base:
        return Verdict(row.method, row.scheme, length, "safe", "full precision")
    estimate, low, high = change(row, base, length, "perplexity", confidence)
    found, worse, better = change(row, base, length, "retrieval", confidence)
    limit = math.log1p(tolerance)
    measured = (
        f"perplexity {percent(estimate)} ({between(low, high)}), retrieval {found:+.2f} ({worse:+.2f} to {better:+.2f})"
    )
    if low > limit or better < 0:
        named = blame(row.errors, marked, row.attribution, tolerance)
        return Verdict(row.method, row.scheme, length, "unsafe", measured, *named, row.attribution)
    if row.cache_bits[length] == FORMATS["none"]:
        return Verdict(row.method, row.scheme, length, "undecided", f"nothing is quantized at {length} tokens")
    kind = "safe" if high <= limit and found >= -LOST else "undecided"
    return Verdict(row.method, row.scheme, length, kind, measured)


def long_keys(seen: Capture) -> dict[int, Tensor]:
    """Return the pairs whose mean key is many times longer than the median, by layer: (key heads, pairs) bool."""
    radii = {layer.index: layer.key.radius for layer in seen.layers}
    median = float(torch.cat([radius.flatten() for radius in radii.values()]).median())
    return {index: radius > RATIO * median for index, radius in radii.items()}


def longest_keys(seen: Capture) -> dict[int, Tensor]:
    """Return those of :func:`long_keys` at least half as long as their head's longest: they set its range."""
    radii = {layer.index: layer.key.radius for layer in seen.layers}
    return {
        index: mask & (radii[index] >= radii[index].amax(1, keepdim=True) / 2)
        for index, mask in long_keys(seen).items()
    }


def blame(
    errors: Sequence[LayerErrors],
    marked: Mapping[int, Tensor] | None = None,
    attribution: Attribution | None = None,
    tolerance: float = math.inf,
) -> tuple[tuple[int, ...], tuple[int, ...], float | None]:
    """Return the layers to blame for the harm of a scheme, and the pairs behind it.

    A layer is named when it alone costs more than is tolerated, or at least two thirds of what the worst layer alone
    does; where that was not measured, when the mean error of its heads' outputs is two thirds of the worst's. Where at
    least half of its squared logit error lies in other pairs and goes when long keys are kept in full precision, those
    are named: they stretch the scale that others share. Elsewhere the pairs that carry half of the error; none where
    values cost more than keys.

    Args:
        errors: by layer.
        marked: pairs of long keys by layer, from :func:`longest_keys`: (key heads, pairs) bool.
        attribution: what parts of the scheme cost.
        tolerance: rise of perplexity that a safe scheme may cost, relative.

    Returns:
        Indices of layers, of pairs (the fastest is 0), and the share of the error that long keys cost other pairs, None
        where it is less than half. Empty without errors.
    """
    if not errors:
        return (), (), None
    harm = torch.stack([error.output.mean() for error in errors]).nan_to_num()
    if attribution is not None:
        harm = torch.tensor([attribution.layers.get(error.layer, 0.0) for error in errors], dtype=torch.float64)
    least = BLAMED * float(harm.max())
    if attribution is not None:
        least = min(least, math.log1p(tolerance))
    worst = [error for error, own in zip(errors, harm.tolist(), strict=True) if own >= least]
    layers = tuple(error.layer for error in worst)
    if attribution is not None and attribution.by_values:
        return layers, (), None
    energy = torch.zeros(max(error.pair.shape[1] for error in worst), dtype=torch.float64)
    long: set[int] = set()
    spoilt = whole = 0.0
    for error in worst:
        energy[: error.pair.shape[1]] += error.pair.square().sum(0)
        squares, others = error.logit.square(), (error.induced - error.direct).nan_to_num()
        whole += float(squares.sum())
        spoilt += float((others * squares).sum())
        if marked and error.layer in marked:
            mask = marked[error.layer].repeat_interleave(len(squares) // len(marked[error.layer]), 0)
            long |= set(mask[others >= 0.5].any(0).nonzero().flatten().tolist())
    if long and spoilt >= whole / 2:
        return layers, tuple(sorted(long)), min(1.0, spoilt / whole)
    order = energy.argsort(descending=True, stable=True)
    needed = int((energy[order].cumsum(0) < energy.sum() / 2).sum()) + 1
    return layers, tuple(sorted(order[:needed].tolist())) if float(energy.sum()) > 0 else (), None


# --- words -----------------------------------------------------------------------------------------------------------


def relative(nats: float) -> float:
    """Return a change of perplexity as a share of it, from one of the loss [nats/token]."""
    return math.expm1(nats) if nats < 700 else math.inf


def percent(nats: float) -> str:
    """A change of the loss, as one of perplexity in words.

    >>> percent(math.log(1.5)), percent(20.0)
    ('+50.0%', 'over +1000%')
    """
    share = relative(nats)
    return f"{share:+.1%}" if share < 10 else "over +1000%"


def between(low: float, high: float) -> str:
    """An interval of such changes; of a single window there is none."""
    return f"{percent(low)} to {percent(high)}" if math.isfinite(high - low) else "no interval from one window"


def windows_of(count: int, size: int) -> str:
    """Windows of text in words.

    >>> windows_of(1, 128), windows_of(16, 4096)
    ('1 window of 128 tokens', '16 windows of 4096 tokens, which do not overlap')
    """
    return f"{counted(count, 'window')} of {size} tokens{', which do not overlap' * (count > 1)}"


def counted(count: int, what: str) -> str:
    """A number of things.

    >>> counted(1, "sample"), counted(4, "sample")
    ('1 sample', '4 samples')
    """
    return f"{count} {what}{'s' * (count != 1)}"


def listed(what: str, indices: Sequence[int]) -> str:
    """Indices of something as one says them.

    >>> listed("layer", [0, 3, 4, 5]), listed("pair", [7]), listed("pair", [])
    ('layers 0, 3-5', 'pair 7', 'no pair')
    """
    return f"{what}{'s' * (len(indices) > 1)} {spans(indices)}" if indices else f"no {what}"


def spans(indices: Sequence[int]) -> str:
    """Indices, those that follow each other as a range.

    >>> spans([0, 3, 4, 5])
    '0, 3-5'
    """
    parts: list[list[int]] = []
    for index in indices:
        if parts and index == parts[-1][1] + 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)
