"""Error attribution: which layers, pairs, keys or values make a format unsafe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rope_patch.analysis.outliers import OUTLIER_RATIO
from rope_patch.evaluation.number_format import percent
from rope_patch.kv_evaluation.attention_errors import LayerErrors
from rope_patch.modeling.state_statistics import Capture
from rope_patch.runtime.captions import indices_text

NAMED_SHARE = 2 / 3
"""Layers that cost at least this share of the worst layer's cost are named."""


@dataclass(frozen=True)
class Attribution:
    """The costs of the parts of a format on the compared windows.

    A cost is the rise of the loss over full precision [nats/token].

    Attributes:
        whole: cost of the whole format.
        keys: cost of its keys alone, with values in full precision.
        values: cost of its values alone, with keys in full precision.
        layers: cost of each layer alone, with all others in full precision, by its index.
        worst: indices of the layers that are named, see :func:`worst_layers`.
        pairs: indices of the pairs of their keys that are named. They are those of :func:`longest_keys` or of
            :func:`worst_pairs`, whichever lower the cost more if they are left in full precision; empty if values cost
            more than keys, or neither lower the cost.
        left: cost of the format with these pairs of these layers in full precision; None if no pair is named.
    """

    whole: float
    keys: float
    values: float
    layers: Mapping[int, float]
    worst: tuple[int, ...] = ()
    pairs: tuple[int, ...] = ()
    left: float | None = None

    def __str__(self) -> str:
        """Return the layers and pairs from which the cost comes, as text."""
        text = indices_text("layer", self.worst)
        if self.pairs:
            text += f", {indices_text('pair', self.pairs)}"
            if self.left is not None:
                text += f" (the whole format {percent(self.whole)}, with these in full precision {percent(self.left)})"
        elif abs(self.values) > abs(self.keys):
            text = f"values of {text}"
        return text


def worst_layers(costs: Mapping[int, float], tolerance: float) -> tuple[int, ...]:
    """Return the layers that alone cost more than is tolerated, or at least two thirds of the worst layer's cost.

    A fall of the loss counts as a rise does.

    Args:
        costs: cost of each layer alone, by its index [nats/token].
        tolerance: relative change of perplexity that a safe format may cause.
    """
    # A relative change of perplexity is a difference of losses by the logarithm.
    least = min(NAMED_SHARE * max(map(abs, costs.values())), math.log1p(tolerance))
    return tuple(layer for layer, cost in costs.items() if abs(cost) >= least)


def longest_keys(capture: Capture, layers: Sequence[int]) -> tuple[int, ...]:
    """Return the pairs whose mean key determines the range of its head in at least one of some layers.

    Such a mean key is many times as long as the median over all pairs of the model, and at least half as long as the
    longest of its head.

    Args:
        capture: the statistics of keys.
        layers: indices of the layers.
    """
    radii = {layer.index: layer.key.radius for layer in capture.layers}
    median = float(torch.cat([radius.flatten() for radius in radii.values()]).median())
    pairs: set[int] = set()
    for layer in layers:
        radius = radii[layer]
        long = (radius > OUTLIER_RATIO * median) & (radius >= radius.amax(1, keepdim=True) / 2)
        pairs.update(long.any(0).nonzero().flatten().tolist())
    return tuple(sorted(pairs))


def worst_pairs(errors: Sequence[LayerErrors]) -> tuple[int, ...]:
    """Return the fewest pairs that cause half of the squared error of the logits of some layers; 0 is the fastest."""
    energy = torch.zeros(max(error.pair.shape[1] for error in errors), dtype=torch.float64)
    for error in errors:
        energy[: error.pair.shape[1]] += error.pair.square().sum(0)
    if not float(energy.sum()) > 0:  # also true for NaN
        return ()
    order = energy.argsort(descending=True, stable=True)
    needed = int((energy[order].cumsum(0) < energy.sum() / 2).sum()) + 1
    return tuple(sorted(order[:needed].tolist()))
