"""Figures of an analysis, each with what it shows in words and how to read it. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rope_patch.analysis.before_after import Difference
from rope_patch.analysis.decomposition import Decomposition, decompose, rotate, trajectory
from rope_patch.analysis.heads import Heads, LayerHeads
from rope_patch.analysis.outliers import RATIO, feature_maps, scatter
from rope_patch.analysis.run import Analysis
from rope_patch.analysis.sinks import Sinks
from rope_patch.analysis.views import HeadView
from rope_patch.evaluation.metrics import number_text
from rope_patch.modeling.statistics import LayerCapture
from rope_patch.plots import analysis as plots_analysis
from rope_patch.plots import outliers as plots_outliers
from rope_patch.plots.analysis import PAIRS, feature_map, heat_maps, pair_lines, pair_map, spread
from rope_patch.plots.analysis import Map as Panel
from rope_patch.reports.analysis_words import Kind, kinds, relative, spans_of, stacked, word
from rope_patch.reports.comparison import Picture, picture

ROLES = {"query": "queries", "key": "keys", "value": "values"}
LINE = (
    "The line marked 2π/L is Jonasson’s frequency bound: pairs on its slow side make no full turn within the context."
)
PATTERN = 128
"""Positions of the attention of mean queries to mean keys [tokens]."""
WHOLE, SPARSE = 512, 700
"""Distances taken one by one, and how many are taken beyond them, at even ratios."""
DECOMPOSED = 3
"""Heads whose mean logits are taken apart."""
LONGEST, LEFT_OUT, PLANES = 5, 3, 3
"""Pairs drawn of a mean logit, left out of it, and shown in their plane."""


def habits(analysis: Analysis) -> Picture:
    """Return where all heads attend."""
    layers = analysis.heads.layers
    of: list[tuple[str, Callable[[LayerHeads], Tensor]]] = [
        ("own token", lambda layer: layer.offset_mass[:, 0]),
        ("previous token", lambda layer: layer.offset_mass[:, 1]),
        ("first token", lambda layer: layer.first_mass),
        ("all sinks", lambda layer: layer.sink_mass),
        ("induction, on the text", lambda layer: layer.induction_mass),
        ("induction, on repeated tokens", lambda layer: layer.repeated_mass),
    ]
    rows = [str(layer.index) for layer in layers]
    ticks = {head: str(head) for head in spread(max(layer.heads for layer in layers), 9)}
    panels = [Panel(name, stacked([part(layer) for layer in layers]), rows, ticks) for name, part in of]
    told = []
    for panel in panels:
        values = panel.values.nan_to_num(-1.0)
        if float(values.max()) >= 0:
            row, head = divmod(int(values.argmax()), values.shape[1])
            told.append(f"{panel.name} {number_text(float(values.max()))} in {rows[row]}.{head}")
    missing = any(bool(panel.values.isnan().any()) for panel in panels)
    grey = " Grey: not measured, since the text is too short or a layer has fewer heads." if missing else ""
    figure = heat_maps(
        [panels[:3], panels[3:]],
        title="Where heads attend",
        xlabel="query head",
        ylabel="layer",
        labels=["mean attention weight"],
        limits=(0.0, 1.0),
    )
    return picture(
        figure,
        f"Six heat maps of mean attention weight, layers by heads. The largest: {'; '.join(told)}.",
        "Mean weight that each head puts on the query’s own token, the previous one, the first one, on all tokens that "
        "draw attention from afar (sinks), and on the token that followed the query’s token earlier (induction): on "
        f"the text, and on random tokens that come twice, where nothing else can know what follows.{grey} The largest: "
        f"{'; '.join(told)}.",
    )


def view(analysis: Analysis, shown: HeadView) -> Picture:
    """Return a single head."""
    layer = analysis.capture.layer(shown.layer)
    terms = {distance: shown.mean_terms(distance) for distance in (0, 1)}
    logits = [float(shown.logits.diagonal(-distance).mean()) for distance in terms]
    habit = ", ".join(analysis.heads.layer(shown.layer).habits(shown.head)) or "no habit"
    name = f"Layer {shown.layer}, head {shown.head}: {habit}"
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
        f" Features that do not rotate add {number_text(rest[0])} and {number_text(rest[1])} more."
        if shown.query.shape[1] > 2 * len(shown.inv_freq)
        else ""
    )
    most = list(dict.fromkeys(int(values.abs().argmax()) for values in terms.values()))
    largest = " and ".join(f"pair {pair}" for pair in most)
    return picture(
        figure,
        f"{name}: norms of its pairs by token, its attention, and what each pair adds to two logits.",
        f"{name}. The bars add up to the mean logit with the own key, {number_text(logits[0])}, and with the "
        f"previous one, {number_text(logits[1])}; the largest are of {largest}.{unrotated}",
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
    told = []
    for role, plural in ROLES.items():
        kind, values = max(
            ((kind, _norms(kind, role)) for kind in kinds(analysis.capture)), key=lambda item: float(item[1].max())
        )
        row, pair = divmod(int(values.argmax()), values.shape[1])
        told.append(f"{plural} {number_text(float(values.max()))} in layer {kind.rows[row]}, pair {pair}")
    return picture(
        figure,
        f"Heat maps of mean norm over layers and pairs, for queries, keys and values. Largest: {'; '.join(told)}.",
        "Barbero et al., figures 3, 4, 10 and 13: mean over tokens and heads. A bright column is a frequency that the "
        "model uses. Values do not rotate: what their map shows is no effect of rotation. One scale of colour for "
        "each of queries, keys and values; an arrow on it says that larger values have its last colour. Largest: "
        f"{'; '.join(told)}. {LINE}",
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
    why = "the layer with most positional heads" if count else "no layer has a positional head; this is the first"
    return picture(
        figure,
        f"Heat maps of mean norm over heads and pairs in layer {index}.",
        f"The same in layer {index}, head by head ({why}{f', {count}' if count else ''}). Keys and values may have "
        "fewer heads than queries: each then serves several of theirs.",
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
            told = f"{100 * abs(change):.0f} % {'above' if change > 0 else 'below'} the mean of all"
            most = max(most, (abs(change), f"“{names[row]}”, pair {pair} of {kind.of(plural)}: {told}"))
        grid.append(line)
    figure = pair_lines(grid, title="Mean norm of each pair, by domain", ylabel="mean norm")
    return picture(
        figure,
        f"Lines of mean norm over pairs, one per domain: {', '.join(names)}.",
        "Barbero et al., figure 19: means over tokens, heads and layers. Lines that lie on each other say that "
        f"frequencies are used alike whatever the text. They differ most for {most[1]}. {LINE}",
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
        f"Jonasson, figures 1 and 9: over tokens and heads, before rotation. Features {layout} form pair i. Outlier "
        "features are bright columns of the mean that run through several layers; a feature bright in the largest "
        f"value alone is large at few tokens. {LINE}",
    )


def outlier_scatter(analysis: Analysis) -> list[Picture]:
    """Return radius against angle with both bounds, and deviation against radius."""
    points = scatter(analysis.capture)
    cuts = {states: RATIO * float(points.radius(states).median()) for states in ("key", "query")}
    told = []
    for states, cut in cuts.items():
        long = points.radius(states) > cut
        counts = [int((long & mask).sum()) for mask in (points.partial, points.within_angle)]
        told.append(
            f"of {int(long.sum())} outliers of the {ROLES[states]} {counts[0]} lie below the frequency bound and "
            f"{counts[1]} beyond the angle bound"
        )
    said = "; ".join(told)
    first = picture(
        plots_outliers.radius_angle(points, cuts, title="Length of every pair’s mean, and the two bounds"),
        f"Points of length against turns, angle, and angle less its bound, for keys and queries: {said}.",
        "Jonasson, figures 8 and 11: a point is a pair of one query head. Left: pairs left of the dashed line make no "
        "full turn within the context; only they can be offset features. Middle: the angle from mean query to mean "
        "key. Right: the same less π + L f / 2, which is another bound for each pair: right of the dashed line a pair "
        f"adds less at every distance than at 0. Dotted: {RATIO:g} times the median length. Counted, {said}.",
    )
    lost = int((~torch.isfinite(points.key_deviation)).sum() + (~torch.isfinite(points.query_deviation)).sum())
    missing = f" {lost} points whose directions cancel out are not drawn." if lost else ""
    second = picture(
        plots_outliers.deviation(points, title="How much directions differ, and the length of the mean"),
        "Points of circular standard deviation against length of the mean, for keys and queries.",
        "Jonasson, figure 2. 0 is one direction for all tokens, from about 2 on there is none. A mean is long only "
        f"where tokens agree: long pairs carry a constant, not content.{missing}",
    )
    return [first, second]


# --- mean logits -----------------------------------------------------------------------------------------------------


def clearest(heads: Heads, most: int = DECOMPOSED) -> list[tuple[int, int]]:
    """Return the clearest positional heads: one of each of own and previous token first; the nearest if none is."""
    positional = heads.positional()
    if not positional:
        every = [(layer.index, head) for layer in heads.layers for head in range(layer.heads)]
        return [max(every, key=lambda at: float(heads.layer(at[0]).offset_mass[at[1]].max()))]

    def clear(layer: int, head: int) -> float:
        return float(heads.layer(layer).offset_mass[head].max())

    order = sorted(((layer, head) for layer, head, _ in positional), key=lambda at: -clear(*at))
    habits = {(layer, head): set(habits) for layer, head, habits in positional}
    first = [next((at for at in order if habit in habits[at]), None) for habit in ("previous token", "diagonal")]
    return list(dict.fromkeys(at for at in [*first, *order] if at is not None))[:most]


def busiest(heads: Heads) -> tuple[int, int]:
    """Return the layer with most positional heads, and how many it has."""
    counts = {layer.index: 0 for layer in heads.layers}
    for index, _, _ in heads.positional():
        counts[index] += 1
    index = max(counts, key=lambda at: counts[at])
    return index, counts[index]


def distances_of(context: int) -> Tensor:
    """Return whole distances below a context, every one while they are few, at even ratios beyond [tokens]."""
    far = torch.logspace(math.log10(WHOLE), math.log10(max(context, WHOLE)), SPARSE, dtype=torch.float64)
    sparse = [distance for distance in far.round().long().tolist() if WHOLE <= distance < context]
    return torch.tensor([*range(min(context, WHOLE)), *sorted(set(sparse))])


def mean_logit(analysis: Analysis, index: int, head: int) -> Picture:
    """Return what the mean query and key of a head say about distance."""
    layer = analysis.capture.layer(index)
    made = decompose(layer, distances_of(layer.context))
    logits = (made.pairs[head] * made.rotary_scaling) * made.scaling
    total = logits.sum(0) + made.constant[head] * made.scaling
    product = layer.query.radius[head] * layer.key_by_query_head.radius[head]
    longest = product.argsort(descending=True, stable=True)[:LONGEST].tolist()
    swing = logits.amax(1) - logits.amin(1)
    left_out = sorted(longest, key=lambda pair: -float(swing[pair]))[:LEFT_OUT]
    queries = range(min(PATTERN, layer.context))
    pattern = made.pattern(queries)[head]
    found = next((found for found in analysis.sinks if found.layer == index), None)
    title = f"Layer {index}, head {head}: {', '.join(analysis.heads.layer(index).habits(head)) or 'no habit'}"
    figure = plots_outliers.mean_logits(
        made.distances,
        total,
        {pair: logits[pair] for pair in longest},
        left_out,
        pattern,
        _paths(layer, head, found, longest[:PLANES]),
        inv_freq=layer.inv_freq,
        title=title,
    )
    return picture(
        figure,
        f"{title}: mean logit over distance, with and without single pairs; the attention it would give; and the mean "
        "query’s way through the planes of its longest pairs.",
        f"{title}. {_alone(analysis, made, pattern, head)} The sum changes most without pair {left_out[0]}."
        f"{_sink_words(analysis, found, head)}",
    )


def _alone(analysis: Analysis, made: Decomposition, pattern: Tensor, head: int) -> str:
    """What the means say of the distance that the head is most about, beside what the head does."""
    masses = analysis.heads.layer(made.layer).offset_mass[head]
    offset = int(masses.argmax())
    which = {0: "its own token", 1: "the previous one"}.get(offset, f"the one {offset} back")
    if offset >= len(pattern):
        return ""
    alone = number_text(float(pattern[-1, -1 - offset]))
    return (
        f"Mean query and mean key alone would put {alone} of the attention of a query at position {len(pattern) - 1} "
        f"on {which}; the head puts {number_text(float(masses[offset]))} there."
    )


def _sink_words(analysis: Analysis, found: Sinks | None, head: int) -> str:
    if found is None:
        return ""
    places = zip(found.token[head].tolist(), found.position[head].tolist(), strict=True)
    told = ", ".join(
        f"{number} “{word(analysis, token)}” at {position}" for number, (token, position) in enumerate(places, 1)
    )
    return f" Keys that the mean query prefers: {told}."


def _paths(
    layer: LayerCapture, head: int, found: Sinks | None, pairs: Sequence[int]
) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """The mean query at up to 200 positions, those positions, and preferred keys at theirs, by pair."""
    steps = torch.linspace(0, layer.context - 1, 200, dtype=torch.float64).round().long()
    positions = torch.tensor(sorted(set(steps.tolist())))
    path = trajectory(layer, positions)[head]
    if found is None:
        return {pair: (path[pair], positions, torch.zeros(0, 2)) for pair in pairs}
    table = layer.inv_freq.double()
    keys = torch.stack([
        rotate(key, table, position[None])[:, 0]
        for key, position in zip(found.key_pairs[head], found.position[head], strict=True)
    ])  # fmt: skip
    return {pair: (path[pair], positions, keys[:, pair]) for pair in pairs}


# --- p, differences --------------------------------------------------------------------------------------------------


def trial_shares(analysis: Analysis) -> Picture:
    """Return what the pairs that each p stops carry, and what stopping them costs."""
    tried = [trial for trial in analysis.trials if trial.change is not None]
    carried = {
        "norm of the queries": [trial.query_share for trial in tried],
        "norm of the keys": [trial.key_share for trial in tried],
        "logits": [trial.logit_share for trial in tried],
        "logits, turned within the context": [trial.turned for trial in tried],
    }
    rises: dict[str, list[tuple[float, float, float]]] = {}
    for trial in tried:
        for span, (estimate, low, high) in zip(spans_of(analysis), trial.change or (), strict=False):
            rises.setdefault(span, []).append((relative(estimate), relative(low), relative(high)))
    figure = plots_outliers.shares(
        [trial.p for trial in tried], carried, rises, title="What each p stops, and what it costs"
    )
    return picture(
        figure,
        "Shares carried by the stopped pairs and the change of perplexity, against p.",
        "Left: what the pairs that p stops carry; with rotation in mind, what they turn within the context. Right: the "
        "change of perplexity without any training, with 95 % intervals over the windows. A small p is cheap where the "
        "stopped pairs carry much but turn little.",
    )


def norm_changes(analysis: Analysis, found: Difference, before: str, after: str) -> Picture:
    """Return how mean norms have changed, by layer and pair."""
    rows = {index: row for row, index in enumerate(found.layers)}
    grid = []
    for kind in kinds(analysis.capture):
        at = [rows[layer.index] for layer in kind.layers]
        grid.append([
            pair_map(title, values[at, : len(kind.inv_freq)], kind.rows, kind.inv_freq, kind.context)
            for title, values in zip(kind.titled(["queries", "keys"]), (found.query_norm, found.key_norm), strict=True)
        ])  # fmt: skip
    label = "log2 of the ratio of mean norms"
    figure = heat_maps(
        grid, title="Change of the mean norm of each pair", xlabel=PAIRS, ylabel="layer", labels=[label], diverging=True
    )
    every = torch.cat((found.query_norm, found.key_norm)).flatten()
    finite = every[torch.isfinite(every)]
    most = float(finite[finite.abs().argmax()]) if len(finite) else 0.0
    told = f"{most:+.2g}".replace("-", "−")
    return picture(
        figure,
        f"Heat maps of the change of mean norms over layers and pairs, from {before} to {after}.",
        f"Means over heads, {after} over {before}, at the wavelengths of {before}: red is longer, blue "
        f"shorter, white the same; 1 is twice, −1 half. The largest is {told}. {LINE}",
    )


def _norms(kind: Kind, role: str) -> Tensor:
    return torch.stack([getattr(layer, role).mean_norm.mean(0) for layer in kind.layers])
