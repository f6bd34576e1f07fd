"""Figures of where heads attend and which pairs they use: arrays in, matplotlib Figure out. Needs matplotlib.

Heat maps over pairs name a few pairs by their wavelength, and draw the frequency bound of Jonasson, arXiv:2503.01832,
as a line between pairs: those on its far side make no full turn within the context.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy
from matplotlib import font_manager, patheffects
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure
from torch import Tensor

from rope_patch.frequencies import offset_frequency_bound, wavelength
from rope_patch.plots.base import COLORS, line_styles, wrapped
from rope_patch.plots.theory import shared_legend, without_spines

BOUND = "2π/L"
SHOWN = 0.995
"""Quantile of the values that colours end at, where a few larger ones would leave all others in the dark."""
PAIRS = "wavelength of the pair [tokens]\n(number of the pair)"


class Map(NamedTuple):
    """A panel of heat maps.

    Attributes:
        name: above it; it may have two lines.
        values: (rows, columns); what is no finite number has no colour.
        rows: name of each row.
        ticks: column to its label.
        edges: columns at whose edges the bound lies.
    """

    name: str
    values: Tensor
    rows: Sequence[str]
    ticks: Mapping[int, str]
    edges: Sequence[float] = ()


def pair_map(name: str, values: Tensor, rows: Sequence[str], inv_freq: Tensor, context: int) -> Map:
    """Return a panel over pairs.

    Args:
        name: above it.
        values: (rows, pairs).
        rows: name of each row.
        inv_freq: (pairs,) [rad/token].
        context: distances of the frequency bound [tokens].
    """
    return Map(name, values, rows, pair_ticks(inv_freq), bound_edges(inv_freq, context))


def feature_map(
    name: str, values: Tensor, rows: Sequence[str], inv_freq: Tensor, context: int, *, interleaved: bool
) -> Map:
    """Return a panel over the features of a head: (rows, head_dim); those behind the pairs do not rotate."""
    pairs, width = len(inv_freq), values.shape[1]
    waves = wavelength(inv_freq.double()).tolist()

    def pair(feature: int) -> int:
        return feature // 2 if interleaved else feature % pairs

    labelled = {0, width - 1} | ({pairs // 2, pairs, pairs + pairs // 2} if not interleaved else {width // 2})
    ticks = {i: f"{i}\n{waved(waves[pair(i)]) if i < 2 * pairs else 'no pair'}" for i in sorted(labelled)}
    at = bound_edges(inv_freq, context)
    edges = [2 * edge + 0.5 for edge in at] if interleaved else [*at, *(pairs + edge for edge in at)]
    return Map(name, values, rows, ticks, edges)


def heat_maps(
    grid: Sequence[Sequence[Map]],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    labels: Sequence[str],
    limits: tuple[float, float] | None = None,
) -> Figure:
    """Draw heat maps side by side, on one scale of colour per column of panels, or on one for all.

    Args:
        grid: rows of panels; a panel without columns is left out.
        title: of the figure.
        xlabel: of the columns of a map, with their unit.
        ylabel: of the rows of a map.
        labels: of the colours, with their unit: one per column of panels, or a single one for all.
        limits: values at the ends of the colours; by default from 0.
    """
    down, across = len(grid), max(map(len, grid))
    heights = [min(3.4, max(0.85, 0.15 * max(len(panel.rows) for panel in line))) for line in grid]
    figure = Figure(figsize=(10, sum(heights) + 0.75 * down + 1.3), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False, height_ratios=heights)
    columns = [[line[i] for line in grid if i < len(line)] for i in range(across)]
    together = len(labels) == 1
    every = [panel for column in columns for panel in column]
    scales = [_scale(every if together else column, limits) for column in columns]
    colors = matplotlib.colormaps["viridis"].with_extremes(bad="0.88")
    image: Any = None
    for i in range(across):
        used = []
        for j, line in enumerate(grid):
            if i >= len(line) or not line[i].values.shape[1]:
                axes[j][i].remove()
                continue
            image = _draw(axes[j][i], line[i], colors, scales[i][0])
            axes[j][i].set_ylabel(ylabel if i == 0 else "", fontsize=9)
            axes[j][i].set_xlabel(xlabel if j == down - 1 else "", fontsize=9)
            used.append(axes[j][i])
        if used and not together:
            add_bar(figure, image, used, labels[i], scales[i][1])
    if together and image is not None:
        add_bar(figure, image, [panel for panel in figure.axes], labels[0], scales[0][1])
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def pair_lines(
    grid: Sequence[Sequence[tuple[str, Mapping[str, Tensor], Tensor, int]]], *, title: str, ylabel: str
) -> Figure:
    """Draw values over pairs, a line per group.

    Args:
        grid: rows of panels: name, group to values (pairs,), inv_freq (pairs,) [rad/token], and the context of the
            frequency bound [tokens].
        title: of the figure.
        ylabel: of the values, with their unit.
    """
    down, across = len(grid), max(map(len, grid))
    figure = Figure(figsize=(10, 2.1 * down + 1.1), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False)
    lines: dict[str, Any] = {}
    for j, line in enumerate(grid):
        for i, (name, groups, inv_freq, context) in enumerate(line):
            panel = axes[j][i]
            for (group, values), style in zip(groups.items(), line_styles(len(groups)), strict=True):
                lines[drawable(group)] = panel.plot(values.numpy(), **{**style, "linewidth": 1.3})[0]
            without_spines(panel)
            _pair_axis(panel, inv_freq, context)
            panel.set_ylim(bottom=0)
            _name(panel, name, pad=12)
            panel.set_ylabel(ylabel if i == 0 else "", fontsize=9)
            panel.set_xlabel(PAIRS if j == down - 1 else "", fontsize=9)
    shared_legend(figure, lines)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def head_view(
    query: Tensor,
    key: Tensor,
    pattern: Tensor,
    terms: Mapping[int, Tensor],
    inv_freq: Tensor,
    *,
    context: int,
    window: int | None,
    title: str,
) -> Figure:
    """Draw one head on one text: the norms of its pairs token by token, its attention, and what each pair adds.

    Args:
        query: (tokens, pairs) norms.
        key: (tokens, pairs) norms.
        pattern: (queries, keys) attention weights.
        terms: distance [tokens] to what each pair adds to the mean logit there (pairs,); two of them.
        inv_freq: (pairs,) [rad/token].
        context: distances of the frequency bound [tokens].
        window: tokens a query sees; None for all [tokens].
        title: of the figure.
    """
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    spec = figure.add_gridspec(3, 2, width_ratios=(1.25, 1), height_ratios=(1, 1, 0.95))
    colors = matplotlib.colormaps["viridis"].with_extremes(bad="0.88")
    ticks, edges = pair_ticks(inv_freq), bound_edges(inv_freq, context)
    for row, (name, norms) in enumerate((("queries", query), ("keys", key))):
        axes = figure.add_subplot(spec[row, 0])
        norm, extend = _scale([Map("", norms, (), {})], None)
        image = axes.imshow(_masked(norms.T), cmap=colors, norm=norm, interpolation="none", aspect="auto")
        axes.set_title(f"Norms of the {name}, token by token", loc="left", fontsize=9)
        axes.set_yticks(list(ticks), [label.partition("\n")[0] for label in ticks.values()])
        axes.set_ylabel("wavelength\n[tokens]", fontsize=9)
        axes.set_xlabel("position [tokens]" if row else "", fontsize=9)
        axes.tick_params(labelsize=8)
        for edge in edges:
            _outlined(axes.axhline(edge, color="white", linewidth=1.1))
        add_bar(figure, image, [axes], "norm", extend, vertical=True)
    draw_pattern(figure, figure.add_subplot(spec[:2, 1]), pattern, window=window, title="Attention")
    first: Axes | None = None
    for column, (distance, values) in enumerate(terms.items()):
        axes = figure.add_subplot(spec[2, column], sharey=first)
        axes.bar(range(len(values)), values.numpy(), width=0.85, color=COLORS[0])
        axes.axhline(0, color="0.4", linewidth=0.8)
        without_spines(axes)
        _pair_axis(axes, inv_freq, context)
        which = {0: "its own key", 1: "the previous key"}.get(distance, f"the key {distance} back")
        axes.set_title(f"What each pair adds to the logit with {which}", loc="left", fontsize=9, pad=12)
        axes.set_xlabel(PAIRS, fontsize=9)
        axes.set_ylabel("logit" if first is None else "", fontsize=9)
        first = first or axes
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def draw_pattern(figure: Figure, axes: Axes, pattern: Tensor, *, window: int | None, title: str) -> None:
    """Draw attention weights (queries, keys); keys that a query does not see are grey."""
    hidden = numpy.triu(numpy.ones(tuple(pattern.shape), dtype=bool), 1)
    if window is not None:
        hidden |= numpy.tril(numpy.ones_like(hidden), -window)
    colors = matplotlib.colormaps["viridis"].with_extremes(bad="0.88")
    shown = numpy.ma.masked_array(pattern.numpy(), mask=hidden)
    image = axes.imshow(shown, cmap=colors, norm=PowerNorm(0.5, vmin=0, vmax=1), interpolation="none")
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlabel("position of the key [tokens]", fontsize=9)
    axes.set_ylabel("of the query [tokens]", fontsize=9)
    axes.tick_params(labelsize=8)
    add_bar(figure, image, [axes], "weight (square-root scale)", "neither", vertical=True, ticks=(0, 0.05, 0.2, 0.5, 1))


# --- pairs on an axis ------------------------------------------------------------------------------------------------


def waved(length: float) -> str:
    """A wavelength in a few characters.

    >>> [waved(x) for x in (6.2832, 56.2, 1131.0, 35333.1, 2.5e6, math.inf)]
    ['6.3', '56', '1.1k', '35k', '2.5M', '∞']
    """
    if math.isinf(length):
        return "∞"
    unit, size = next(
        ((unit, size) for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)) if length >= size), ("", 1.0)
    )
    scaled = length / size
    return (f"{scaled:.1f}".removesuffix(".0") if scaled < 9.95 else f"{scaled:.0f}") + unit  # fmt: skip


def pair_ticks(inv_freq: Tensor) -> dict[int, str]:
    """Return a few pairs, the first and the last among them, with wavelength [tokens] and number."""
    waves = wavelength(inv_freq.double()).tolist()
    last, most = len(waves) - 1, 5 if len(waves) >= 12 else 4
    chosen = sorted({round(i * last / (most - 1)) for i in range(most)})
    return {pair: f"{waved(waves[pair])}\n({pair})" for pair in chosen}


def bound_edges(inv_freq: Tensor, context: int) -> list[float]:
    """Return where the frequency bound lies: between pairs of which one makes a full turn and the other does not.

    >>> from rope_patch.frequencies import geometric
    >>> bound_edges(geometric(1e4, 32), 2048)  # Phi-1: pairs 11 to 15 make none
    [10.5]
    """
    partial = (inv_freq.double() < offset_frequency_bound(context)).tolist()
    return [i + 0.5 for i in range(len(partial) - 1) if partial[i] != partial[i + 1]]


def drawable(text: str) -> str:
    """Text with a box for each character that the font of figures lacks."""
    known = font_manager.get_font(font_manager.findfont(font_manager.FontProperties())).get_charmap()
    return "".join(sign if ord(sign) in known and sign.isprintable() else "\N{WHITE SQUARE}" for sign in text)


def _pair_axis(axes: Axes, inv_freq: Tensor, context: int) -> None:
    ticks = pair_ticks(inv_freq)
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.tick_params(labelsize=8)
    axes.set_xlim(-0.6, len(inv_freq) - 0.4)
    for edge in bound_edges(inv_freq, context):
        axes.axvline(edge, color="0.25", linewidth=1, linestyle="--")
        _name_bound(axes, edge)


# --- parts of heat maps ----------------------------------------------------------------------------------------------


def _draw(axes: Axes, panel: Map, colors: Any, norm: Normalize) -> Any:
    image = axes.imshow(_masked(panel.values), cmap=colors, norm=norm, interpolation="none", aspect="auto")
    _name(axes, panel.name, pad=12 if panel.edges else 4)
    axes.set_xticks(list(panel.ticks), list(panel.ticks.values()))
    rows = spread(len(panel.rows), 9)
    axes.set_yticks(rows, [drawable(panel.rows[row]) for row in rows])
    axes.tick_params(labelsize=8)
    for edge in panel.edges:
        _outlined(axes.axvline(edge, color="white", linewidth=1.1))
        _name_bound(axes, edge)
    return image


def _name(axes: Axes, name: str, *, pad: float) -> None:
    axes.set_title("\n".join(wrapped(drawable(line), 80) for line in name.split("\n")), loc="left", fontsize=9, pad=pad)


def _name_bound(axes: Axes, edge: float) -> None:
    axes.annotate(BOUND, (edge, 1), (0, 1), xycoords=("data", "axes fraction"), textcoords="offset points",
                  ha="center", va="bottom", fontsize=7, color="0.25")  # fmt: skip


def _outlined(line: Any) -> None:
    """A white line is seen on dark and on bright colours."""
    line.set_path_effects([patheffects.withStroke(linewidth=2.4, foreground="black")])


def _masked(values: Tensor) -> Any:
    return numpy.ma.masked_invalid(values.numpy())


def _scale(panels: Sequence[Map], limits: tuple[float, float] | None) -> tuple[Normalize, str]:
    """Ends of the colours, and on which side values lie beyond them."""
    if limits is not None:
        return Normalize(*limits), "neither"
    parts = [panel.values.numpy().ravel() for panel in panels if panel.values.numel()]
    values = numpy.abs(numpy.concatenate(parts)) if parts else numpy.zeros(0)
    values = values[numpy.isfinite(values)]
    top = float(values.max()) if len(values) else 0.0
    usual = float(numpy.quantile(values, SHOWN)) if len(values) else 0.0
    cut = 0 < 1.5 * usual < top
    end = (usual if cut else top) or 1.0
    return Normalize(0.0, end), "max" if cut else "neither"


def add_bar(
    figure: Figure,
    image: Any,
    axes: Sequence[Axes],
    label: str,
    extend: str,
    *,
    vertical: bool = False,
    ticks: Sequence[float] | None = None,
) -> Any:
    """Add a colour bar to a figure."""
    where: dict[str, Any] = (
        {"location": "right", "aspect": 18, "fraction": 0.05, "pad": 0.01}
        if vertical
        else {"location": "bottom", "aspect": 30, "fraction": 0.06, "pad": 0.02, "shrink": 0.8 if len(axes) > 3 else 1}
    )
    few = matplotlib.ticker.MaxNLocator(4) if ticks is None and not vertical else ticks
    bar = figure.colorbar(image, ax=list(axes), extend=extend, ticks=few, **where)
    bar.set_label(label, fontsize=9)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
    return bar


def spread(count: int, most: int) -> list[int]:
    """Return indices from 0 at an even step that people count in, no more than ``most``.

    >>> spread(6, 9), spread(32, 9), spread(80, 9)
    ([0, 1, 2, 3, 4, 5], [0, 4, 8, 12, 16, 20, 24, 28], [0, 10, 20, 30, 40, 50, 60, 70])
    """
    steps = (size * ten for ten in (1, 10, 100, 1000) for size in (1, 2, 4, 5, 8))
    step = next((step for step in steps if -(-count // step) <= most), count)
    return list(range(0, count, step))
