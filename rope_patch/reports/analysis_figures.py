"""Figures of an analysis, each with a caption that says how to read it and what stands out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rope_patch.analysis.heads import SINK_WEIGHT, TYPE_SHARE
from rope_patch.analysis.outliers import contributions, once_per_key_head
from rope_patch.analysis.result import Analysis
from rope_patch.analysis.single_heads import SingleHead
from rope_patch.modeling.state_statistics import Capture, LayerCapture, Statistics, pairs_of
from rope_patch.reports.plots import analysis as plots
from rope_patch.reports.plots.analysis import PAIR_AXIS, Map, few, pair_map
from rope_patch.runtime.captions import ranges_text
from rope_patch.runtime.number_format import number_text
from rope_patch.runtime.page import Figure, figure

PLURAL_OF_ROLE = {"query": "queries", "key": "keys", "value": "values"}
BOUND_CAPTION = (
    "A line 2π/L, where there is one, is the frequency bound of Jonasson (2025): slower pairs make no full turn within "
    "the context L."
)
Panel = tuple[Tensor, dict[int, str]]
"""The values of a heat map of pairs (rows, pairs), and the names of some of its rows."""
MOST_CONTRIBUTIONS = 4
"""Number of outliers whose contribution by distance is drawn."""


def attention_masses(analysis: Analysis) -> Figure:
    """Return the figure of the attention mass of every head, by what it attends to."""
    layers = analysis.heads.layers
    names = (
        "own token",
        "previous token",
        "one of the tokens 2 to 7 back",
        "first token",
        "all sinks",
        "induction",
    )
    masses = [
        torch.stack(
            (
                layer.offset_mass[:, 0],
                layer.offset_mass[:, 1],
                layer.offset_mass[:, 2:].amax(1),
                layer.first_mass,
                layer.sink_mass,
                layer.induction_mass,
            ),
            dim=1,
        )
        for layer in layers
    ]
    # Layers may have different numbers of heads.
    values = pad_sequence(masses, batch_first=True, padding_value=math.nan)
    rows = few([layer.index for layer in layers])
    columns = few(range(values.shape[1]))
    panels = [Map(name, values[..., i], rows, columns) for i, name in enumerate(names)]
    caption = (
        "Mean weight that each head puts on its own token, an earlier one, the first one, sinks, and, in random tokens "
        "that come twice, the token that followed the same token before (induction). What was not measured is grey."
    )
    return figure(
        plots.heat_maps,
        [panels[:3], panels[3:]],
        title="Attention mass of each head",
        caption=caption,
        xlabel="query head",
        ylabel="layer",
        label="mean attention weight",
        limits=(0.0, 1.0),
    )


def single_head(analysis: Analysis, shown: SingleHead) -> Figure:
    """Return the figure of a single head: norms of its pairs, attention, and what each pair adds to the logit."""
    measured = analysis.heads.layer(shown.layer)
    types = measured.head_types(shown.head)
    if not types and float(measured.content_mass[shown.head]) >= TYPE_SHARE:
        types = ("looks for content",)
    title = f"Layer {shown.layer}, head {shown.head}: {', '.join(types) or 'no type'}"
    if "first token" in types or "sink" in types:
        first, others = shown.sink_terms()
        terms = {"the first key": first, "the keys after it": others}
    else:
        terms = {"its own key": shown.mean_terms(0), "the previous key": shown.mean_terms(1)}
    sums = ", ".join(f"{number_text(float(values.sum()))} with {name}" for name, values in terms.items())
    caption = f"{title}. The bars add up to a mean logit of {sums}, without features outside the table."
    rows = few(range(len(shown.token_ids)))
    context = analysis.capture.layer(shown.layer).context
    norms = [
        pair_map(f"Norms of the {name}", shown.norms(states), rows, shown.inv_freq, context)
        for name, states in (("queries", shown.query), ("keys", shown.key))
    ]
    return figure(plots.head_view, norms, shown.pattern, terms, title=title, caption=caption)


def head_norms(analysis: Analysis) -> Figure:
    """Return the figure of the mean norm of each pair by head; the rows of positional heads are named."""
    positional = analysis.heads.positional()

    def panel(layers: Sequence[LayerCapture], role: str) -> Panel:
        heads: list[Tensor] = []
        names: dict[int, tuple[int, str]] = {}
        most = 30 / sum(getattr(layer, role).heads for layer in layers)
        for layer in layers:
            states = getattr(layer, role)
            for index, head in positional:
                if index == layer.index:
                    row = len(heads) + head * states.heads // layer.query.heads
                    # Names of neighbouring rows would be written over each other.
                    names[int(row * most)] = (row, f"{index}.{head}")
            heads += states.mean_norm
        return torch.stack(heads), dict(names.values())

    return _by_kind(
        analysis,
        panel,
        title="Mean norm of each pair, by head",
        caption="Means over tokens, a row for each head, in which positional heads are named (Barbero et al. 2024, "
        f"figures 4 and 11). {BOUND_CAPTION}",
        ylabel="layer.head",
    )


def norms_by_layer(analysis: Analysis) -> Figure:
    """Return the figure of the mean norm of each pair by layer."""
    return _by_layer(
        analysis,
        lambda states: states.mean_norm.mean(0),
        title="Mean norm of each pair, by layer",
        caption=f"Means over tokens and heads (Barbero et al. 2024, figures 3, 10 and 13). {BOUND_CAPTION}",
        label="mean norm",
    )


def largest_features(analysis: Analysis) -> Figure:
    """Return the figure of the largest magnitude of both features of each pair, by layer."""
    return _by_layer(
        analysis,
        lambda states: pairs_of(states.largest.amax(0), states.pairs, states.interleaved).amax(-1),
        title="Largest magnitude in each pair, by layer",
        caption="Over both features, all heads and tokens (Jonasson 2025, figure 1): a pair that is large in all "
        f"layers is what the scales of a cache have to hold. {BOUND_CAPTION}",
        label="largest magnitude",
    )


def radius_by_layer(analysis: Analysis) -> Figure:
    """Return the figure of the length of the mean of each pair by layer, the longest of its heads."""
    return _by_layer(
        analysis,
        lambda states: states.radius.amax(0),
        title="Longest mean of each pair, by layer",
        caption=f"The length of the mean vector of a pair, the longest of all heads. {BOUND_CAPTION}",
        label="length of the mean",
    )


def mean_head(analysis: Analysis, head: SingleHead) -> Figure:
    """Return the figure of a head's mean query and key by distance, and of its longest pair of keys token by token."""
    layer = analysis.capture.layer(head.layer)
    most = head.window or 2 * layer.context
    added = contributions(layer, head.head, torch.arange(most))
    total = added.sum(0)
    edges = _log_distances(most)
    longest = int(layer.key_by_query_head.radius[head.head].argmax())
    shown = head.shown
    states = {"queries": shown.query, "keys": shown.key}
    points = {name: shown.pairs(values)[:, longest] for name, values in states.items()}
    measured = analysis.heads.layer(head.layer)
    resting = measured.sink_position[head.head][measured.sink_weight[head.head] > SINK_WEIGHT]
    sinks = {0, *resting[resting < len(shown.token_ids)].tolist()}
    points["first key, and sinks"] = points["keys"][sorted(sinks)]
    title = f"Layer {head.layer}, head {head.head}: mean query and key, and pair {longest}"
    caption = (
        "Left and middle: what each pair adds to the logit, the sum D(p), and the attention that it gives: means over "
        "ever wider bins of distances from 1 to the window or twice the context (dotted: the context; Jonasson 2025, "
        "figures 6 and 10). Right: the pair before rotation, token by token (figure 7)."
    )
    return figure(
        plots.draw_mean_head,
        edges,
        _bin_means(added, edges),
        _bin_means(torch.stack((total, total.softmax(0))), edges),
        {pair: label.replace("\n", " ") for pair, label in plots.pair_ticks(layer.inv_freq).items()},
        layer.context,
        points,
        title=title,
        caption=caption,
    )


def _log_distances(most: int) -> Tensor:
    """Return the edges of ever wider bins of the distances from 1 to a largest one [tokens]."""
    edges: Tensor = torch.unique(torch.logspace(0, math.log10(most), 60).round().long())
    return edges


def _bin_means(values: Tensor, edges: Tensor) -> Tensor:
    """Return the means over bins of values at the distances 0, 1, 2, …: (..., bins)."""
    means: Tensor = values.cumsum(-1)[..., edges - 1].diff(dim=-1).div(edges.diff())
    return means


def _by_layer(
    analysis: Analysis, of: Callable[[Statistics], Tensor], *, title: str, caption: str, label: str
) -> Figure:
    """Return heat maps of what a function returns for the states of a layer (pairs,), a row for each layer."""

    def panel(layers: Sequence[LayerCapture], role: str) -> Panel:
        return torch.stack([of(getattr(layer, role)) for layer in layers]), few([layer.index for layer in layers])

    return _by_kind(analysis, panel, title=title, caption=caption, ylabel="layer", label=label)


def _by_kind(
    analysis: Analysis,
    panel: Callable[[Sequence[LayerCapture], str], Panel],
    *,
    ylabel: str,
    title: str,
    caption: str,
    label: str = "mean norm",
) -> Figure:
    """Return heat maps over pairs, a column for queries, keys and values and a row for each kind of layers."""
    grid = []
    for kind, layers in kinds(analysis.capture):
        row: list[Map] = []
        for role, plural in PLURAL_OF_ROLE.items():
            name = f"{kind}\n{plural}".strip()
            row.append(pair_map(name, *panel(layers, role), layers[0].inv_freq, layers[0].context))
        grid.append(row)
    return figure(plots.heat_maps, grid, title=title, caption=caption, xlabel=PAIR_AXIS, ylabel=ylabel, label=label)


def kinds(capture: Capture) -> list[tuple[str, list[LayerCapture]]]:
    """Return the layers grouped by table and context, with a name for each group; "" where there is but one.

    Those of a group share an axis of wavelengths and a bound.
    """
    groups: dict[tuple[object, ...], list[LayerCapture]] = {}
    for layer in capture.layers:
        groups.setdefault((layer.context, layer.query.mean.shape[1], *layer.inv_freq.tolist()), []).append(layer)
    if len(groups) == 1:
        return [("", list(capture.layers))]
    named = []
    for layers in groups.values():
        types = " and ".join(dict.fromkeys(layer.layer_type for layer in layers if layer.layer_type))
        label = types or f"layers {ranges_text([layer.index for layer in layers])}"
        named.append((f"{label}, {layers[0].context} tokens", layers))
    return named


def outliers(analysis: Analysis) -> Figure:
    """Return the figure of every pair's radius, angle, turns and circular deviation, with both bounds."""
    points = {role: analysis.pairs[role] for role in ("query", "key")}
    caption = (
        "A point is a pair of a query head. Left: offset features (orange) lie beyond both bounds of Jonasson (2025), "
        "which are the lines in the middle, where pairs of more than 1.5 turns are not shown; on the left the line is "
        "at π, the least angle of the slowest pairs. The larger a point, the longer its mean. Right: long means are "
        "those of vectors that point one way."
    )
    return figure(plots.draw_outliers, points, title="Every pair: length and angle of its mean", caption=caption)


def by_distance(analysis: Analysis) -> Figure:
    """Return the figure of what the longest outliers add to the mean logit of their heads, by distance."""
    panels = []
    for pair in once_per_key_head(analysis.capture, analysis.pairs["key"])[:MOST_CONTRIBUTIONS]:
        layer = analysis.capture.layer(pair.layer)
        logits = contributions(layer, pair.head, torch.arange(layer.context))
        # Fast pairs turn many times between two pixels of a logarithmic axis, which shows means over bins.
        edges = _log_distances(layer.context)
        one, every = _bin_means(torch.stack((logits[pair.pair], logits.sum(0))), edges)
        panels.append((f"head {pair.layer}.{pair.head}, pair {pair.pair}:\n{pair.kind}", edges[:-1], one, every))
    caption = (
        "Logit of the mean query with the mean key of a head, D(p), the part of one pair, d(p), and the rest "
        "(Jonasson 2025, figures 5, 6 and 10), as means over ever wider bins of distances. An offset feature adds less "
        "at every distance than at 0, for which a logarithmic axis has no place."
    )
    title = "What the longest pairs of the keys add, by distance"
    return figure(plots.draw_by_distance, panels, title=title, caption=caption)
