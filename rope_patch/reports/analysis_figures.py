"""Figures of an analysis, each with a caption that says how to read it and what stands out. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rope_patch.analysis.decomposition import decompose
from rope_patch.analysis.heads import Heads, LayerHeads
from rope_patch.analysis.outliers import RATIO, scatter
from rope_patch.analysis.result import Analysis
from rope_patch.analysis.views import HeadView
from rope_patch.evaluation.numbers import number_text, relative
from rope_patch.reports.analysis_tables import ROLES, spans_of
from rope_patch.reports.layer_kinds import Kind, kinds
from rope_patch.reports.page import Figure, drawn
from rope_patch.reports.plots import outliers as plots_outliers
from rope_patch.reports.plots.analysis import PAIRS, Map, head_view, heat_maps, pair_map, spread

LINE = "The line 2π/L is the frequency bound of Jonasson (2025): slower pairs make no full turn within the context L."
EVERY, SAMPLES = 512, 700
"""Distances below ``EVERY`` are all computed; beyond it ``SAMPLES`` at even ratios."""
DECOMPOSED, LONGEST, LEFT_OUT = 3, 5, 3
"""Heads whose mean logits are shown; pairs of a head that are drawn; pairs that are left out of its sum."""


def attention_masses(analysis: Analysis) -> Figure:
    """Return the attention mass of every head by what it attends to."""
    layers = analysis.heads.layers
    masses: list[tuple[str, Callable[[LayerHeads], Tensor]]] = [
        ("own token", lambda layer: layer.offset_mass[:, 0]),
        ("previous token", lambda layer: layer.offset_mass[:, 1]),
        ("first token", lambda layer: layer.first_mass),
        ("all sinks", lambda layer: layer.sink_mass),
        ("induction, on the text", lambda layer: layer.induction_mass),
        ("induction, on repeated tokens", lambda layer: layer.repeated_mass),
    ]
    rows = [str(layer.index) for layer in layers]
    ticks = {head: str(head) for head in spread(max(layer.heads for layer in layers), 9)}
    panels = [Map(name, _stacked([part(layer) for layer in layers]), rows, ticks) for name, part in masses]
    figure = heat_maps(
        [panels[:3], panels[3:]],
        title="Attention mass of each head",
        xlabel="query head",
        ylabel="layer",
        label="mean attention weight",
        limits=(0.0, 1.0),
    )
    caption = (
        "Mean weight that each head puts on its own token, the previous one, the first one, all sinks, and the token "
        "that followed the same token before (induction). Grey: not measured."
    )
    return drawn(figure, caption)


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    """Return vectors as rows of one matrix, nan behind the shorter ones."""
    out = torch.full((len(rows), max(len(row) for row in rows)), math.nan, dtype=torch.float64)
    for line, row in zip(out, rows, strict=True):
        line[: len(row)] = row
    return out


def view(analysis: Analysis, shown: HeadView) -> Figure:
    """Return a single head."""
    terms = {distance: shown.mean_terms(distance) for distance in (0, 1)}
    logits = [number_text(float(shown.logits.diagonal(-distance).mean())) for distance in terms]
    title = _title(analysis, shown.layer, shown.head)
    figure = head_view(
        {"queries": shown.query_norms, "keys": shown.key_norms},
        shown.pattern,
        terms,
        shown.inv_freq,
        context=analysis.capture.layer(shown.layer).context,
        window=shown.window,
        title=title,
    )
    bare = shown.query.shape[1] - 2 * len(shown.inv_freq)
    also = f", with what {bare} features without rotation add" if bare else ""
    caption = (
        f"{title}: the bars add up to the mean logit of a query with its own key, {logits[0]}, and with the previous "
        f"key, {logits[1]}{also}. {LINE}"
    )
    return drawn(figure, caption)


def _title(analysis: Analysis, layer: int, head: int) -> str:
    types = analysis.heads.layer(layer).head_types(head)
    return f"Layer {layer}, head {head}: {', '.join(types) or 'no type'}"


def norms(analysis: Analysis) -> Figure:
    """Return the mean norm of each pair by layer."""

    def by_layer(kind: Kind, role: str) -> Tensor:
        return torch.stack([getattr(layer, role).mean_norm.mean(0) for layer in kind.layers])

    caption = f"Means over tokens and heads (Barbero et al. 2024, figures 3, 4, 10 and 13). {LINE}"
    return _norms(analysis, "layer", by_layer, caption)


def group_norms(analysis: Analysis) -> Figure:
    """Return the mean norm of each pair by group of rows."""

    def by_group(kind: Kind, role: str) -> Tensor:
        return torch.stack([getattr(layer, role).group_norm.mean(1) for layer in kind.layers]).mean(0)

    caption = (
        "Where the rows are alike, the model uses the frequencies alike in every domain (figure 19 of Barbero et al.)."
    )
    return _norms(analysis, "domain", by_group, caption)


def _norms(analysis: Analysis, rows: str, means: Callable[[Kind, str], Tensor], caption: str) -> Figure:
    """Return mean norms of each pair, a line of panels for each kind of layers.

    Args:
        analysis: of a checkpoint.
        rows: what the rows of a panel are, ``"layer"`` or ``"domain"``.
        means: gives the norms of queries, keys or values: (rows, pairs).
        caption: how to read the figure.
    """
    grid = []
    for kind in kinds(analysis.capture):
        names = kind.rows if rows == "layer" else list(analysis.capture.groups)
        titles = zip(ROLES, kind.titled(list(ROLES.values())), strict=True)
        grid.append([pair_map(name, means(kind, role), names, kind.inv_freq, kind.context) for role, name in titles])
    return drawn(
        heat_maps(grid, title=f"Mean norm of each pair, by {rows}", xlabel=PAIRS, ylabel=rows, label="mean norm"),
        caption,
    )


def outlier_scatter(analysis: Analysis) -> Figure:
    """Return length against turns and against the angle, with both bounds."""
    points = scatter(analysis.capture)
    cuts = {states: RATIO * float(points.radius(states).median()) for states in ("key", "query")}
    counted = []
    for states, cut in cuts.items():
        long = points.radius(states) > cut
        below, beyond = (int((long & mask).sum()) for mask in (points.partial, points.within_angle))
        counted.append(
            f"of {int(long.sum())} outliers of the {ROLES[states]} {below} lie below the frequency bound and {beyond} "
            "beyond the angle bound"
        )
    figure = plots_outliers.radius_angle(points, cuts, title="Length of every pair’s mean, and the two bounds")
    caption = f"Each point is a pair of one query head (Jonasson 2025, figures 8 and 11): {'; '.join(counted)}."
    return drawn(figure, f"{caption} Dotted: {RATIO:g} times the median length.")


# --- mean logits -----------------------------------------------------------------------------------------------------


def clearest(heads: Heads, most: int = DECOMPOSED) -> list[tuple[int, int]]:
    """Return layer and head of the clearest positional heads: first one previous-token and one diagonal head.

    If no head is positional, the head that is closest to being one.
    """

    def clear(at: tuple[int, int]) -> float:
        return float(heads.layer(at[0]).offset_mass[at[1]].max())

    positional = {(layer, head): types for layer, head, types in heads.positional()}
    if not positional:
        return [max(((layer.index, head) for layer in heads.layers for head in range(layer.heads)), key=clear)]
    order = sorted(positional, key=clear, reverse=True)
    first = [next((at for at in order if name in positional[at]), None) for name in ("previous token", "diagonal")]
    return list(dict.fromkeys(at for at in [*first, *order] if at is not None))[:most]


def distances_of(context: int) -> Tensor:
    """Return distances below a context: every whole one up to ``EVERY``, then some at even ratios [tokens]."""
    far = torch.logspace(math.log10(EVERY), math.log10(max(context, EVERY)), SAMPLES, dtype=torch.float64)
    sparse = {distance for distance in far.round().long().tolist() if EVERY <= distance < context}
    return torch.tensor([*range(min(context, EVERY)), *sorted(sparse)])


def mean_logit(analysis: Analysis, index: int, head: int) -> Figure:
    """Return a head's mean logit over distance."""
    layer = analysis.capture.layer(index)
    parts = decompose(layer, distances_of(layer.context))
    logits = (parts.pairs[head] * parts.rotary_scaling) * parts.scaling
    total = logits.sum(0) + parts.constant[head] * parts.scaling
    product = layer.query.radius[head] * layer.key_by_query_head.radius[head]
    longest = product.argsort(descending=True, stable=True)[:LONGEST].tolist()
    swing = logits.amax(1) - logits.amin(1)
    left_out = sorted(longest, key=lambda pair: -float(swing[pair]))[:LEFT_OUT]
    title = _title(analysis, index, head)
    terms = {pair: logits[pair] for pair in longest}
    figure = plots_outliers.mean_logits(
        parts.distances, total, terms, left_out, inv_freq=layer.inv_freq, title=f"{title}, mean logit"
    )
    query = min(128, layer.context) - 1
    alone = parts.pattern(range(query + 1))[head, -1]
    masses = analysis.heads.layer(index).offset_mass[head]
    offset = min(int(masses.argmax()), query)
    which = {0: "its own token", 1: "the previous token"}.get(offset, f"the token {offset} back")
    caption = (
        f"{title}. Mean query and mean key alone would put {number_text(float(alone[query - offset]))} of the "
        f"attention of a query at position {query} on {which}; the head puts {number_text(float(masses[offset]))} "
        "there."
    )
    return drawn(figure, caption)


# --- p ---------------------------------------------------------------------------------------------------------------


def p_sweep(analysis: Analysis) -> Figure:
    """Return what the pairs that each p zeroes carry, and what zeroing them costs."""
    points = [point for point in analysis.p_sweep if point.change is not None]
    carried = {
        "norm of the queries": [point.query_share for point in points],
        "norm of the keys": [point.key_share for point in points],
        "logits": [point.logit_share for point in points],
        "logits, the part that depends on distance": [point.turned for point in points],
    }
    rises: dict[str, list[tuple[float, float, float]]] = {}
    for point in points:
        for span, (estimate, low, high) in zip(spans_of(analysis), point.change or (), strict=False):
            rises.setdefault(span, []).append((relative(estimate), relative(low), relative(high)))
    figure = plots_outliers.p_sweep(
        [point.p for point in points], carried, rises, title="What each p zeroes, and what it costs"
    )
    caption = (
        "Left: the share of norms and logits that the zeroed pairs carry. Right: the change of perplexity without "
        "training, with 95 % intervals over the windows."
    )
    return drawn(figure, caption)
