"""Error attribution: which layers, pairs, keys or values make a scheme unsafe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rope_patch.analysis.outliers import OUTLIER_RATIO
from rope_patch.evaluation.numbers import percent
from rope_patch.kv_evaluation.attention_errors import LayerErrors
from rope_patch.modeling.statistics import Capture
from rope_patch.runtime.captions import indices_text

NAMED_SHARE = 2 / 3
"""Layers that cost at least this share of the worst layer's cost are named."""


@dataclass(frozen=True)
class Attribution:
    """What parts of a scheme cost on the compared windows, each the rise of the loss over full precision [nats/token].

    Attributes:
        whole: the whole scheme.
        keys: its keys alone, values in full precision.
        values: its values alone.
        layers: each layer alone, all others in full precision.
        worst: the layers that are named, see :func:`worst_layers`.
        pairs: the pairs of their keys that are named: those of :func:`longest_keys` or :func:`worst_pairs`, whichever
            left in full precision lowers the cost more; none where values cost more than keys, or neither lowers it.
        left: the scheme with these pairs of these layers in full precision; None where no pair is named.
    """

    whole: float
    keys: float
    values: float
    layers: Mapping[int, float]
    worst: tuple[int, ...] = ()
    pairs: tuple[int, ...] = ()
    left: float | None = None

    def __str__(self) -> str:
        """Say where the cost comes from."""
        if not self.pairs:
            return f"{'values of ' if self.values > self.keys else ''}{indices_text('layer', self.worst)}"
        left = "" if self.left is None else f" ({percent(self.left)} with these in full precision)"
        return f"{indices_text('layer', self.worst)}, {indices_text('pair', self.pairs)}{left}"


def worst_layers(costs: Mapping[int, float], tolerance: float) -> tuple[int, ...]:
    """Return the layers that alone cost more than is tolerated, or two thirds of what the worst one does.

    Args:
        costs: what each layer costs alone, by its index [nats/token].
        tolerance: rise of perplexity that a safe scheme may cost, relative.
    """
    least = min(NAMED_SHARE * max(costs.values()), math.log1p(tolerance))
    return tuple(layer for layer, cost in costs.items() if cost >= least)


def longest_keys(capture: Capture, layers: Sequence[int]) -> tuple[int, ...]:
    """Return the pairs whose mean key sets the range of its head in some of these layers.

    It is many times longer than the median of the model's pairs, and at least half as long as the longest of its head.
    """
    radii = {layer.index: layer.key.radius for layer in capture.layers}
    median = float(torch.cat([radius.flatten() for radius in radii.values()]).median())
    pairs = {
        pair
        for layer in layers
        for pair in ((radii[layer] > OUTLIER_RATIO * median) & (radii[layer] >= radii[layer].amax(1, keepdim=True) / 2))
        .any(0)
        .nonzero()
        .flatten()
        .tolist()
    }
    return tuple(sorted(pairs))


def worst_pairs(errors: Sequence[LayerErrors]) -> tuple[int, ...]:
    """Return the fewest pairs that carry half of the squared error of the logits of some layers; the fastest is 0."""
    energy = torch.zeros(max(error.pair.shape[1] for error in errors), dtype=torch.float64)
    for error in errors:
        energy[: error.pair.shape[1]] += error.pair.square().sum(0)
    order = energy.argsort(descending=True, stable=True)
    needed = int((energy[order].cumsum(0) < energy.sum() / 2).sum()) + 1
    return tuple(sorted(order[:needed].tolist())) if float(energy.sum()) > 0 else ()
