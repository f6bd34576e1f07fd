"""Figures of the mean logit of single heads over distance, for the report of an analysis. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rope_patch.analysis.decomposition import Decomposition, decompose, rotate, trajectory
from rope_patch.analysis.heads import Heads
from rope_patch.analysis.result import Analysis
from rope_patch.analysis.sinks import Sinks
from rope_patch.evaluation.numbers import number_text
from rope_patch.modeling.statistics import LayerCapture
from rope_patch.plots import outliers as plots_outliers
from rope_patch.reports.analysis_captions import token_text
from rope_patch.reports.comparison import Picture, picture

PATTERN = 128
"""Positions of the attention of mean queries to mean keys [tokens]."""
EVERY, SAMPLES = 512, 700
"""Distances below ``EVERY`` are all computed; beyond it ``SAMPLES`` at even ratios."""
DECOMPOSED = 3
"""Heads whose mean logits are shown."""
LONGEST, LEFT_OUT, PLANES = 5, 3, 3
"""Pairs of a head that are drawn, left out of the sum, and shown in their plane."""


def clearest(heads: Heads, most: int = DECOMPOSED) -> list[tuple[int, int]]:
    """Return layer and head of the clearest positional heads: first one diagonal and one previous-token head.

    If no head is positional, the head that is closest to being one.
    """
    positional = heads.positional()
    if not positional:
        every = [(layer.index, head) for layer in heads.layers for head in range(layer.heads)]
        return [max(every, key=lambda at: float(heads.layer(at[0]).offset_mass[at[1]].max()))]

    def clear(layer: int, head: int) -> float:
        return float(heads.layer(layer).offset_mass[head].max())

    order = sorted(((layer, head) for layer, head, _ in positional), key=lambda at: -clear(*at))
    types = {(layer, head): set(head_types) for layer, head, head_types in positional}
    first = [next((at for at in order if name in types[at]), None) for name in ("previous token", "diagonal")]
    return list(dict.fromkeys(at for at in [*first, *order] if at is not None))[:most]


def distances_of(context: int) -> Tensor:
    """Return distances below a context: every whole one up to ``EVERY``, then some at even ratios [tokens]."""
    far = torch.logspace(math.log10(EVERY), math.log10(max(context, EVERY)), SAMPLES, dtype=torch.float64)
    sparse = [distance for distance in far.round().long().tolist() if EVERY <= distance < context]
    return torch.tensor([*range(min(context, EVERY)), *sorted(set(sparse))])


def mean_logit(analysis: Analysis, index: int, head: int) -> Picture:
    """Return the figure of a head's mean logit over distance."""
    layer = analysis.capture.layer(index)
    parts = decompose(layer, distances_of(layer.context))
    logits = (parts.pairs[head] * parts.rotary_scaling) * parts.scaling
    total = logits.sum(0) + parts.constant[head] * parts.scaling
    product = layer.query.radius[head] * layer.key_by_query_head.radius[head]
    longest = product.argsort(descending=True, stable=True)[:LONGEST].tolist()
    swing = logits.amax(1) - logits.amin(1)
    left_out = sorted(longest, key=lambda pair: -float(swing[pair]))[:LEFT_OUT]
    queries = range(min(PATTERN, layer.context))
    pattern = parts.pattern(queries)[head]
    sinks = next((sinks for sinks in analysis.sinks if sinks.layer == index), None)
    title = f"Layer {index}, head {head}: {', '.join(analysis.heads.layer(index).head_types(head)) or 'no type'}"
    figure = plots_outliers.mean_logits(
        parts.distances,
        total,
        {pair: logits[pair] for pair in longest},
        left_out,
        pattern,
        _paths(layer, head, sinks, longest[:PLANES]),
        inv_freq=layer.inv_freq,
        title=title,
    )
    return picture(
        figure,
        f"{title}: mean logit over distance, with and without single pairs; the attention it would give; and the mean "
        "query’s path through the planes of its longest pairs.",
        f"{title}. {_means_alone(analysis, parts, pattern, head)} Without pair {left_out[0]} the sum changes most."
        f"{_preferred_keys(analysis, sinks, head)}",
    )


def _means_alone(analysis: Analysis, parts: Decomposition, pattern: Tensor, head: int) -> str:
    """Compare the attention that mean query and mean key alone would give with the head's, at its main distance."""
    masses = analysis.heads.layer(parts.layer).offset_mass[head]
    offset = int(masses.argmax())
    which = {0: "its own token", 1: "the previous one"}.get(offset, f"the one {offset} back")
    if offset >= len(pattern):
        return ""
    alone = number_text(float(pattern[-1, -1 - offset]))
    return (
        f"Mean query and mean key alone would put {alone} of the attention of a query at position {len(pattern) - 1} "
        f"on {which}; the head puts {number_text(float(masses[offset]))} there."
    )


def _preferred_keys(analysis: Analysis, sinks: Sinks | None, head: int) -> str:
    if sinks is None:
        return ""
    places = zip(sinks.token[head].tolist(), sinks.position[head].tolist(), strict=True)
    listed = ", ".join(
        f"{number} “{token_text(analysis, token)}” at {position}" for number, (token, position) in enumerate(places, 1)
    )
    return f" Keys that the mean query prefers: {listed}."


def _paths(
    layer: LayerCapture, head: int, sinks: Sinks | None, pairs: Sequence[int]
) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """Return by pair: the mean query at up to 200 positions, those positions, and the preferred keys at theirs."""
    steps = torch.linspace(0, layer.context - 1, 200, dtype=torch.float64).round().long()
    positions = torch.tensor(sorted(set(steps.tolist())))
    path = trajectory(layer, positions)[head]
    if sinks is None:
        return {pair: (path[pair], positions, torch.zeros(0, 2)) for pair in pairs}
    table = layer.inv_freq.double()
    keys = torch.stack([
        rotate(key, table, position[None])[:, 0]
        for key, position in zip(sinks.key_pairs[head], sinks.position[head], strict=True)
    ])  # fmt: skip
    return {pair: (path[pair], positions, keys[:, pair]) for pair in pairs}
