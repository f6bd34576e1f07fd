"""Error attribution: which layers, pairs, keys or values make a scheme unsafe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rope_patch.analysis.outliers import RATIO
from rope_patch.kv_evaluation.errors import LayerErrors
from rope_patch.modeling.statistics import Capture

NAMED = 2 / 3
"""Layers that cost at least this share of the worst layer's cost are named."""


@dataclass(frozen=True)
class Attribution:
    """What parts of a scheme cost on the compared windows, each the rise of the loss over full precision [nats/token].

    Attributes:
        whole: the scheme.
        keys: its keys alone, values in full precision.
        values: its values alone.
        layers: each layer alone, all others in full precision.
        left: the scheme with the pairs that are named kept in full precision in the layers that are named; None where
            no pair is named.
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


def long_keys(capture: Capture) -> dict[int, Tensor]:
    """Return the pairs whose mean key is many times longer than the median, by layer: (key heads, pairs) bool."""
    radii = {layer.index: layer.key.radius for layer in capture.layers}
    median = float(torch.cat([radius.flatten() for radius in radii.values()]).median())
    return {index: radius > RATIO * median for index, radius in radii.items()}


def longest_keys(capture: Capture) -> dict[int, Tensor]:
    """Return those of :func:`long_keys` at least half as long as their head's longest: they set its range."""
    radii = {layer.index: layer.key.radius for layer in capture.layers}
    return {
        index: mask & (radii[index] >= radii[index].amax(1, keepdim=True) / 2)
        for index, mask in long_keys(capture).items()
    }


def attribute(
    errors: Sequence[LayerErrors],
    long_pairs: Mapping[int, Tensor] | None = None,
    costs: Attribution | None = None,
    tolerance: float = math.inf,
) -> tuple[tuple[int, ...], tuple[int, ...], float | None]:
    """Return the layers that the cost of a scheme comes from, and the pairs behind it.

    A layer is named when it alone costs more than is tolerated, or at least two thirds of what the worst layer alone
    does; where that was not measured, when the mean error of its heads' outputs is two thirds of the worst's. Where at
    least half of its squared logit error lies in other pairs and goes when long keys are kept in full precision, those
    are named: they stretch the scale that others share. Elsewhere the pairs that carry half of the error; none where
    values cost more than keys.

    Args:
        errors: by layer.
        long_pairs: pairs of long keys by layer, from :func:`longest_keys`: (key heads, pairs) bool.
        costs: what parts of the scheme cost.
        tolerance: rise of perplexity that a safe scheme may cost, relative.

    Returns:
        Indices of layers, of pairs (the fastest is 0), and the share of the error that long keys cost other pairs, None
        where it is less than half. Empty without errors.
    """
    if not errors:
        return (), (), None
    cost = torch.stack([error.output.mean() for error in errors]).nan_to_num()
    if costs is not None:
        cost = torch.tensor([costs.layers.get(error.layer, 0.0) for error in errors], dtype=torch.float64)
    least = NAMED * float(cost.max())
    if costs is not None:
        least = min(least, math.log1p(tolerance))
    worst = [error for error, own in zip(errors, cost.tolist(), strict=True) if own >= least]
    layers = tuple(error.layer for error in worst)
    if costs is not None and costs.by_values:
        return layers, (), None
    energy = torch.zeros(max(error.pair.shape[1] for error in worst), dtype=torch.float64)
    stretching: set[int] = set()
    induced = whole = 0.0
    for error in worst:
        energy[: error.pair.shape[1]] += error.pair.square().sum(0)
        squares, others = error.logit.square(), (error.induced - error.direct).nan_to_num()
        whole += float(squares.sum())
        induced += float((others * squares).sum())
        if long_pairs and error.layer in long_pairs:
            mask = long_pairs[error.layer].repeat_interleave(len(squares) // len(long_pairs[error.layer]), 0)
            stretching |= set(mask[others >= 0.5].any(0).nonzero().flatten().tolist())
    if stretching and induced >= whole / 2:
        return layers, tuple(sorted(stretching)), min(1.0, induced / whole)
    order = energy.argsort(descending=True, stable=True)
    needed = int((energy[order].cumsum(0) < energy.sum() / 2).sum()) + 1
    return layers, tuple(sorted(order[:needed].tolist())) if float(energy.sum()) > 0 else (), None
