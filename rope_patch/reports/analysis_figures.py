"""Figures of an analysis, each with a text alternative and a caption that says how to read it. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rope_patch.analysis.heads import Heads, LayerHeads
from rope_patch.analysis.outliers import RATIO, feature_maps, scatter
from rope_patch.analysis.result import Analysis
from rope_patch.analysis.views import HeadView
from rope_patch.evaluation.numbers import number_text
from rope_patch.plots import analysis as plots_analysis
from rope_patch.plots import outliers as plots_outliers
from rope_patch.plots.analysis import PAIRS, feature_map, heat_maps, pair_lines, pair_map, spread
from rope_patch.plots.analysis import Map as Panel
from rope_patch.reports.analysis_captions import Kind, kinds, relative, spans_of, stacked
from rope_patch.reports.comparison import Picture, picture

ROLES = {"query": "queries", "key": "keys", "value": "values"}
LINE = (
    "The line marked 2π/L is the frequency bound of Jonasson (2025): pairs on its slow side make no full turn within "
    "the context length L."
)


def attention_masses(analysis: Analysis) -> Picture:
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
    panels = [Panel(name, stacked([part(layer) for layer in layers]), rows, ticks) for name, part in masses]
    largest = []
    for panel in panels:
        values = panel.values.nan_to_num(-1.0)
        if float(values.max()) >= 0:
            row, head = divmod(int(values.argmax()), values.shape[1])
            largest.append(f"{panel.name} {number_text(float(values.max()))} in {rows[row]}.{head}")
    missing = any(bool(panel.values.isnan().any()) for panel in panels)
    grey = " Grey: not measured, because the text is too short or the layer has fewer heads." if missing else ""
    figure = heat_maps(
        [panels[:3], panels[3:]],
        title="Attention mass of each head",
        xlabel="query head",
        ylabel="layer",
        labels=["mean attention weight"],
        limits=(0.0, 1.0),
    )
    return picture(
        figure,
        f"Six heat maps of mean attention weight, layers by heads. The largest values: {'; '.join(largest)}.",
        "Mean weight that each head puts on the query’s own token, on the previous token, on the first token, on all "
        "sinks (tokens that draw attention from far away), and on the token that followed the same token before "
        "(induction). Induction is measured on the text and on repeated random tokens, where a head can predict what "
        f"follows by induction only.{grey} The largest values: {'; '.join(largest)}.",
    )


def view(analysis: Analysis, shown: HeadView) -> Picture:
    """Return a single head."""
    layer = analysis.capture.layer(shown.layer)
    terms = {distance: shown.mean_terms(distance) for distance in (0, 1)}
    logits = [float(shown.logits.diagonal(-distance).mean()) for distance in terms]
    types = ", ".join(analysis.heads.layer(shown.layer).head_types(shown.head)) or "no type"
    name = f"Layer {shown.layer}, head {shown.head}: {types}"
    figure = plots_analysis.head_view(
        shown.query_norms,
        shown.key_norms,
        shown.pattern,
        terms,
        shown.inv_freq,
        context=layer.context,
        window=shown.window,
        title=name,
    )
    rest = [logit - float(values.sum()) for logit, values in zip(logits, terms.values(), strict=True)]
    unrotated = (
        f" Features without rotation add another {number_text(rest[0])} and {number_text(rest[1])}."
        if shown.query.shape[1] > 2 * len(shown.inv_freq)
        else ""
    )
    most = list(dict.fromkeys(int(values.abs().argmax()) for values in terms.values()))
    largest = " and ".join(f"pair {pair}" for pair in most)
    verb = "adds" if len(most) == 1 else "add"
    return picture(
        figure,
        f"{name}: norms of its pairs by token, its attention weights, and what each pair adds to two logits.",
        f"{name}. The bars add up to the mean logit of a query with its own key, {number_text(logits[0])}, and with "
        f"the previous key, {number_text(logits[1])}; {largest} {verb} most.{unrotated}",
    )


def norms(analysis: Analysis) -> Picture:
    """Return the mean norm of each pair by layer."""
    grid = [
        [
            pair_map(title, _norms(kind, role), kind.rows, kind.inv_freq, kind.context)
            for role, title in zip(ROLES, kind.titled(list(ROLES.values())), strict=True)
        ]
        for kind in kinds(analysis.capture)
    ]
    figure = heat_maps(
        grid, title="Mean norm of each pair, by layer", xlabel=PAIRS, ylabel="layer", labels=["mean norm"] * 3
    )
    largest = []
    for role, plural in ROLES.items():
        kind, values = max(
            ((kind, _norms(kind, role)) for kind in kinds(analysis.capture)), key=lambda item: float(item[1].max())
        )
        row, pair = divmod(int(values.argmax()), values.shape[1])
        largest.append(f"{plural} {number_text(float(values.max()))} in layer {kind.rows[row]}, pair {pair}")
    return picture(
        figure,
        f"Heat maps of mean norm over layers and pairs, for queries, keys and values. Largest: {'; '.join(largest)}.",
        "Mean over tokens and heads, as in figures 3, 4, 10 and 13 of Barbero et al. (2024). A bright column is a "
        "frequency that the model uses. Values are not rotated, so a pattern in their map is no effect of rotation. "
        "Queries, keys and values have a colour scale each; an arrow at its end means that larger values share its "
        f"last colour. The largest means: {'; '.join(largest)}. {LINE}",
    )


def head_norms(analysis: Analysis) -> Picture:
    """Return the mean norm of each pair by head, of the layer with most positional heads."""
    index, count = busiest(analysis.heads)
    layer = analysis.capture.layer(index)
    panels = [
        pair_map(
            plural,
            getattr(layer, role).mean_norm,
            [str(head) for head in range(getattr(layer, role).heads)],
            layer.inv_freq,
            layer.context,
        )
        for role, plural in ROLES.items()
    ]
    figure = heat_maps([panels], title=f"Layer {index}, by head", xlabel=PAIRS, ylabel="head", labels=["mean norm"] * 3)
    why = "the layer with most positional heads" if count else "the first layer, because no layer has a positional head"
    return picture(
        figure,
        f"Heat maps of mean norm over heads and pairs in layer {index}.",
        f"The same for each head of layer {index} ({why}{f', {count}' if count else ''}). Keys and values can have "
        "fewer heads than queries (grouped-query attention).",
    )


def group_norms(analysis: Analysis) -> Picture:
    """Return the mean norm of each pair by group of rows."""
    names = analysis.capture.groups
    grid, most = [], (0.0, "")
    for kind in kinds(analysis.capture):
        line = []
        for (role, plural), title in zip(ROLES.items(), kind.titled(list(ROLES.values())), strict=True):
            values = torch.stack([getattr(layer, role).group_norm.mean(1) for layer in kind.layers]).mean(0)
            line.append((title, dict(zip(names, values, strict=True)), kind.inv_freq, kind.context))
            off = values / values.mean(0).clamp_min(1e-30) - 1
            row, pair = divmod(int(off.abs().argmax()), off.shape[1])
            change = float(off[row, pair])
            deviation = f"{100 * abs(change):.0f} % {'above' if change > 0 else 'below'} the mean of all domains"
            most = max(most, (abs(change), f"“{names[row]}”, pair {pair} of {kind.of(plural)}: {deviation}"))
        grid.append(line)
    figure = pair_lines(grid, title="Mean norm of each pair, by domain", ylabel="mean norm")
    return picture(
        figure,
        f"Lines of mean norm over pairs, one per domain: {', '.join(names)}.",
        "Means over tokens, heads and layers, as in figure 19 of Barbero et al. (2024). Where the lines coincide, the "
        f"model uses the frequencies alike in every domain. They differ most for {most[1]}. {LINE}",
    )  # fmt: skip


def features(analysis: Analysis) -> Picture:
    """Return the largest and mean absolute value of each feature by layer."""
    parts = {
        "query_max": "queries, largest",
        "query_mean": "queries, mean",
        "key_max": "keys, largest",
        "key_mean": "keys, mean",
    }
    grid = []
    for kind in kinds(analysis.capture):
        maps = feature_maps(analysis.capture, layers=[layer.index for layer in kind.layers])
        grid.append([
            feature_map(title, getattr(maps, column), kind.rows, kind.inv_freq, kind.context,
                        interleaved=maps.interleaved)
            for column, title in zip(parts, kind.titled(list(parts.values())), strict=True)
        ])  # fmt: skip
    figure = heat_maps(
        grid,
        title="Size of each feature, by layer",
        xlabel="feature of the head\n(wavelength of its pair [tokens])",
        ylabel="layer",
        labels=["largest |q|", "mean |q|", "largest |k|", "mean |k|"],
    )
    layout = "2 i and 2 i + 1" if analysis.capture.layers[0].query.interleaved else "i and i + (number of pairs)"
    return picture(
        figure,
        "Heat maps of largest and mean absolute value of queries and keys over layers and features.",
        f"Over tokens and heads, before rotation, as in figures 1 and 9 of Jonasson (2025). Features {layout} form "
        "pair i. Outlier features are columns that are bright in the mean through several layers; a feature that is "
        f"bright only in the largest value is large at few tokens. {LINE}",
    )


def outlier_scatter(analysis: Analysis) -> list[Picture]:
    """Return two figures: radius against angle with both bounds, and deviation against radius."""
    points = scatter(analysis.capture)
    cuts = {states: RATIO * float(points.radius(states).median()) for states in ("key", "query")}
    counted = []
    for states, cut in cuts.items():
        long = points.radius(states) > cut
        counts = [int((long & mask).sum()) for mask in (points.partial, points.within_angle)]
        counted.append(
            f"of {int(long.sum())} outliers of the {ROLES[states]} {counts[0]} lie below the frequency bound and "
            f"{counts[1]} beyond the angle bound"
        )
    counts_text = "; ".join(counted)
    first = picture(
        plots_outliers.radius_angle(points, cuts, title="Length of every pair’s mean, and the two bounds"),
        f"Points of length against turns, angle, and angle less its bound, for keys and queries: {counts_text}.",
        "As figures 8 and 11 of Jonasson (2025); each point is a pair of one query head. Left: pairs left of the "
        "dashed line make no full turn within the context, and only these can be offset features. Middle: the angle "
        "from mean query to mean key. Right: that angle minus its bound π + L f / 2, which differs from pair to pair; "
        f"right of the dashed line a pair adds less at every distance than at 0. Dotted line: {RATIO:g} times the "
        f"median length. In numbers: {counts_text}.",
    )
    lost = int((~torch.isfinite(points.key_deviation)).sum() + (~torch.isfinite(points.query_deviation)).sum())
    missing = f" {lost} points are not drawn because their directions cancel out." if lost else ""
    second = picture(
        plots_outliers.deviation(points, title="Spread of the directions against the length of the mean"),
        "Points of circular standard deviation against length of the mean, for keys and queries.",
        "As figure 2 of Jonasson (2025). A deviation of 0 means that all tokens share one direction; from about 2 on "
        "there is no common direction. A mean is long only where the tokens agree, so a long pair carries a constant, "
        f"not content.{missing}",
    )
    return [first, second]


def busiest(heads: Heads) -> tuple[int, int]:
    """Return the layer with most positional heads, and how many it has."""
    counts = {layer.index: 0 for layer in heads.layers}
    for index, _, _ in heads.positional():
        counts[index] += 1
    index = max(counts, key=lambda at: counts[at])
    return index, counts[index]


# --- p --------------------------------------------------------------------------------------------------


def p_sweep_shares(analysis: Analysis) -> Picture:
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
    figure = plots_outliers.shares(
        [point.p for point in points], carried, rises, title="What each p zeroes, and what it costs"
    )
    return picture(
        figure,
        "Shares carried by the zeroed pairs and the change of perplexity, against p.",
        "Left: the share of norms and logits that the zeroed pairs carry, and the part of the logits that their "
        "rotation makes depend on distance. Right: the change of perplexity without training, with 95 % intervals "
        "over the windows. A small p is cheap where little of the logits depends on distance.",
    )


def _norms(kind: Kind, role: str) -> Tensor:
    return torch.stack([getattr(layer, role).mean_norm.mean(0) for layer in kind.layers])
