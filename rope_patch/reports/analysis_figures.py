"""Figures of an analysis, each with a caption that says how to read it and what stands out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rope_patch.analysis.heads import LayerHeads
from rope_patch.analysis.result import Analysis
from rope_patch.analysis.single_heads import SingleHead
from rope_patch.evaluation.number_format import number_text
from rope_patch.reports.analysis_tables import PLURAL_OF_ROLE
from rope_patch.reports.layer_kinds import kinds
from rope_patch.reports.page import Figure, figure
from rope_patch.reports.plots.analysis import PAIR_AXIS, Map, head_view, heat_maps, pair_map, spread

BOUND_CAPTION = (
    "A line 2π/L, where there is one, is the frequency bound of Jonasson (2025): slower pairs make no full turn within "
    "the context L."
)


def attention_masses(analysis: Analysis) -> Figure:
    """Return the figure of the attention mass of every head, by what it attends to."""
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
    caption = (
        "Mean weight that each head puts on its own token, the previous one, the first one, all sinks, and the token "
        "that followed the same token before (induction). What was not measured is grey."
    )
    return figure(
        heat_maps,
        [panels[:3], panels[3:]],
        title="Attention mass of each head",
        caption=caption,
        xlabel="query head",
        ylabel="layer",
        label="mean attention weight",
        limits=(0.0, 1.0),
    )


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    """Return vectors as rows of one matrix, nan behind the shorter ones."""
    out = torch.full((len(rows), max(len(row) for row in rows)), math.nan, dtype=torch.float64)
    for line, row in zip(out, rows, strict=True):
        line[: len(row)] = row
    return out


def single_head(analysis: Analysis, shown: SingleHead) -> Figure:
    """Return the figure of a single head: norms of its pairs, attention, and what each pair adds to the logit."""
    terms = {distance: shown.mean_terms(distance) for distance in (0, 1)}
    logits = [number_text(float(shown.logits.diagonal(-distance).mean())) for distance in terms]
    title = _title(analysis, shown.layer, shown.head)
    unrotated_features = shown.query.shape[1] - 2 * len(shown.inv_freq)
    also = ""
    if unrotated_features:
        also = f", with what {unrotated_features} features without rotation add"
    caption = (
        f"{title}: the bars add up to the mean logit of a query with its own key, {logits[0]}, and with the previous "
        f"key, {logits[1]}{also}. {BOUND_CAPTION}"
    )
    return figure(
        head_view,
        {"queries": shown.query_norms, "keys": shown.key_norms},
        shown.pattern,
        terms,
        shown.inv_freq,
        title=title,
        caption=caption,
        context=analysis.capture.layer(shown.layer).context,
        window=shown.window,
    )


def _title(analysis: Analysis, layer: int, head: int) -> str:
    types = analysis.heads.layer(layer).head_types(head)
    return f"Layer {layer}, head {head}: {', '.join(types) or 'no type'}"


def norms(analysis: Analysis) -> Figure:
    """Return the figure of the mean norm of each pair by layer, with a row of panels for each kind of layers."""
    grid = []
    for kind in kinds(analysis.capture):
        row: list[Map] = []
        for role, plural in PLURAL_OF_ROLE.items():
            means = torch.stack([getattr(layer, role).mean_norm.mean(0) for layer in kind.layers])
            name = plural
            if kind.name and not row:
                # The first panel says of which layers the row is, where there are several kinds.
                name = f"{kind.name}\n{plural}"
            row.append(pair_map(name, means, kind.rows, kind.inv_freq, kind.context))
        grid.append(row)
    title = "Mean norm of each pair, by layer"
    caption = f"Means over tokens and heads, as in Barbero et al. (2024). {BOUND_CAPTION}"
    return figure(heat_maps, grid, title=title, caption=caption, xlabel=PAIR_AXIS, ylabel="layer", label="mean norm")
