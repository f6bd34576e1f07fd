"""Figures of where heads attend and which pairs they use: arrays in, matplotlib Figure out. Needs matplotlib.

Axes over pairs name a few pairs by their wavelength, and draw the frequency bound of Jonasson, arXiv:2503.01832, as a
line between pairs: those on its far side make no full turn within the context.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
from torch import Tensor

from rope_patch.analysis.outliers import KINDS, MeanPair
from rope_patch.frequencies import offset_frequency_bound, wavelength
from rope_patch.runtime.plots import COLORS, mark_position, new_figure, plain_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

BOUND_LABEL = "2π/L"
COLOUR_QUANTILE = 0.995
"""Quantile of the values at which the colours end, where a few larger values would leave all others dark."""
FIRST_KEY_WIDTH = 0.03
"""Width at which the first key is drawn, as a share of that of all keys."""
PAIR_AXIS = "wavelength of the pair [tokens]\n(number of the pair)"


class Map(NamedTuple):
    """A panel of heat maps.

    Attributes:
        name: the title of the panel, which may have two lines.
        values: (rows, columns) the numbers; what is no finite number has no colour.
        rows: the labels of some rows, by number of the row.
        ticks: the labels of some columns, by number of the column.
        edges: the places of the frequency bound, as numbers of columns.
    """

    name: str
    values: Tensor
    rows: Mapping[int, str]
    ticks: Mapping[int, str]
    edges: Sequence[float] = ()


def pair_map(name: str, values: Tensor, rows: Mapping[int, str], inv_freq: Tensor, context: int) -> Map:
    """Return a panel over pairs.

    Args:
        name: the title of the panel.
        values: (rows, pairs) the numbers.
        rows: the labels of some rows, by number of the row.
        inv_freq: (pairs,) the table [rad/token].
        context: the greatest distance that the frequency bound considers [tokens].
    """
    return Map(name, values, rows, pair_ticks(inv_freq), bound_edges(inv_freq, context))


def heat_maps(
    grid: Sequence[Sequence[Map]],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    label: str,
    limits: tuple[float, float] | None = None,
) -> Figure:
    """Draw rows of heat maps, with one scale of colour for each column of panels.

    Args:
        grid: the panels, as rows of equal length.
        title: the title of the figure.
        xlabel: the label of the columns of a map, with their unit.
        ylabel: the label of the rows of a map.
        label: the label of the colours, with their unit.
        limits: the values at the two ends of the colours; by default from 0 to the largest or nearly the largest.
    """
    heights = [min(3.4, max(0.85, 0.15 * max(len(panel.values) for panel in line))) for line in grid]
    figure = new_figure(title, sum(heights) + 0.75 * len(grid) + 1.3)
    axes = figure.subplots(len(grid), len(grid[0]), squeeze=False, height_ratios=heights)
    for i, column in enumerate(zip(*grid, strict=True)):
        norm, extend = _scale([panel.values for panel in column], limits)
        for j, panel in enumerate(column):
            image = _draw(axes[j][i], panel, norm)
            if i == 0:
                axes[j][i].set_ylabel(ylabel, fontsize=9)
            if j == len(grid) - 1:
                axes[j][i].set_xlabel(xlabel, fontsize=9)
        add_bar(figure, image, list(axes[:, i]), label, extend)
    return figure


def head_view(norms: Sequence[Map], pattern: Tensor, terms: Mapping[str, Tensor], *, title: str) -> Figure:
    """Draw one head on one text: the norms of its pairs token by token, its attention, and what each pair adds.

    *Source*: Barbero et al., arXiv:2410.06205, figures 5 to 7 and 14 to 18.

    Args:
        norms: two panels over pairs: the norms of the queries and of the keys, (tokens, pairs) each.
        pattern: (queries, keys) attention weights.
        terms: (pairs,) what each pair adds to the mean logit with a key, by the name of the key, for two of them.
        title: the title of the figure.
    """
    figure = new_figure(title, 6.0)
    # Each column has one axis of pairs, and the upper row one of tokens.
    places: Any = [["queries", "keys", "attention"], ["first", "second", "attention"]]
    axes = figure.subplot_mosaic(places, width_ratios=(1, 1, 1.8), height_ratios=(1.7, 1))
    for place, panel in zip(("queries", "keys"), norms, strict=True):
        norm, extend = _scale([panel.values], None)
        add_bar(figure, _draw(axes[place], panel, norm), [axes[place]], "norm", extend)
    axes["queries"].set_ylabel("position [tokens]", fontsize=9)
    _draw_pattern(figure, axes["attention"], pattern)
    axes["second"].sharey(axes["first"])
    for place, (key, values) in zip(("first", "second"), terms.items(), strict=True):
        bars = axes[place]
        bars.bar(range(len(values)), values.numpy(), width=0.85, color=COLORS[0])
        bars.axhline(0, color="0.4", linewidth=0.8)
        _plain(bars, f"What each pair adds to the logit\nwith {key}")
        bars.set_xticks(list(norms[0].ticks), list(norms[0].ticks.values()))
        bars.set_xlim(-0.5, len(values) - 0.5)
        bars.set_ymargin(0.2)  # for the name of the bound
        for edge in norms[0].edges:
            mark_position(bars, edge, BOUND_LABEL)
        bars.set_xlabel(PAIR_AXIS, fontsize=9)
    axes["first"].set_ylabel("logit", fontsize=9)
    return figure


def draw_outliers(points: Mapping[str, Sequence[MeanPair]], *, title: str) -> Figure:
    """Draw every pair of the mean queries and keys by radius, angle, turns and circular deviation.

    *Source*: Jonasson, arXiv:2503.01832, figures 2, 8 and 11. In the middle both bounds are lines.

    Args:
        points: the pairs of the ``"query"`` and of the ``"key"`` states, the longest first.
        title: the title of the figure.
    """
    labels = {
        "phi": "angle from query to key [rad]",
        "radius": "length of the mean",
        "turns": "turns within the context",
        "deviation": "circular deviation [rad]",
    }
    figure = new_figure(title, 6.2, dpi=160)
    for row, (role, pairs) in zip(figure.subplots(2, 3), points.items(), strict=True):
        for axes, x, y in zip(row, ("phi", "turns", "radius"), ("radius", "phi", "deviation"), strict=True):
            for kind, color in zip(KINDS, ("0.6", COLORS[0], COLORS[1], COLORS[2]), strict=True):
                shown = [pair for pair in pairs if pair.kind == kind]
                if shown:
                    axes.scatter(
                        [getattr(pair, x) for pair in shown],
                        [getattr(pair, y) for pair in shown],
                        [2 + 25 * pair.radius / pairs[0].radius for pair in shown],
                        label=kind,
                        color=color,
                        alpha=0.3,
                        linewidths=0,
                        # Many points would make a large file as shapes.
                        rasterized=True,
                    )
            axes.set(xlabel=labels[x], ylabel=labels[y])
            _plain(axes, f"mean {role}")
        row[0].axvline(math.pi, color="0.2", linewidth=1, linestyle="--")
        row[1].plot([0, 1], [math.pi, 2 * math.pi], color="0.2", linewidth=1, linestyle="--")
        row[1].axvline(1, color="0.2", linewidth=1, linestyle=":")
        row[1].set_xlim(-0.05, 1.5)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper right", ncols=4, markerscale=3, frameon=False)
    return figure


def draw_by_distance(panels: Sequence[tuple[str, Tensor, Tensor, Tensor]], *, title: str) -> Figure:
    """Draw what one pair adds to the mean logit of a head by distance, beside all pairs and all others.

    *Source*: Jonasson, arXiv:2503.01832, figures 5, 6 and 10.

    Args:
        panels: of each pair its name, distances from 1 on [tokens], what it adds there, and what all pairs add.
        title: the title of the figure.
    """
    figure = new_figure(title, 2.9)
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (name, distances, one, every) in zip(row, panels, strict=True):
        axes.plot(distances, every, color="black", label="all pairs, D(p)")
        axes.plot(distances, one, color=COLORS[1], label="the pair, d(p)")
        axes.plot(distances, every - one, color=COLORS[0], label="the others")
        axes.set(xscale="log", xlabel="distance [tokens]")
        _plain(axes, name)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper right", ncols=3, frameon=False, fontsize=8)
    figure.supylabel("logit", fontsize=9)
    return figure


def draw_mean_head(
    edges: Tensor,
    added: Tensor,
    together: Tensor,
    rows: Mapping[int, str],
    context: int,
    points: Mapping[str, Tensor],
    *,
    title: str,
) -> Figure:
    """Draw what the pairs of a head's mean query and key add by distance, and the states of one pair.

    *Source*: Jonasson, arXiv:2503.01832, figures 6, 7 and 10.

    Args:
        edges: the edges of the bins of distances [tokens].
        added: (pairs, bins) what each pair adds to the logit.
        together: (2, bins) the logit of all pairs, and the attention that it gives.
        rows: the labels of some pairs.
        context: the context, drawn as a line [tokens].
        points: (tokens, 2) states of one pair by their name.
        title: the title of the figure.
    """
    figure = new_figure(title, 4.2)
    every, sums, states = figure.subplots(1, 3)
    largest = float(added.abs().max()) or 1.0
    places = numpy.arange(len(added) + 1) - 0.5
    image = every.pcolormesh(edges.numpy(), places, added.numpy(), cmap="RdBu_r", vmin=-largest, vmax=largest)
    every.set(xscale="log", xlabel="distance [tokens]", ylabel="wavelength [tokens] (number of the pair)")
    every.set_yticks(list(rows), list(rows.values()))
    every.invert_yaxis()
    _plain(every, "What each pair adds to the logit")
    add_bar(figure, image, [every], "logit", "neither")
    sums.plot(edges[:-1], together[0], color="black")
    sums.set(xscale="log", xlabel="distance [tokens]", ylabel="logit of the mean query and key, D(p)")
    sums.axvline(context, color="0.4", linewidth=1, linestyle=":")
    _plain(sums, "All pairs")
    attention = sums.twinx()
    attention.plot(edges[:-1], together[1], color=COLORS[0])
    attention.set_ylabel("attention that it gives", fontsize=9, color=COLORS[0])
    attention.tick_params(labelsize=8)
    for color, marker, (name, values) in zip((*COLORS[:2], "black"), "..x", points.items(), strict=False):
        states.scatter(*values.numpy().T, s=20, alpha=0.6, color=color, marker=marker, label=name, rasterized=True)
    states.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    states.axvline(0, color="0.8", linewidth=0.8, zorder=0)
    states.set(xlabel="first feature", ylabel="second feature")
    figure.legend(*states.get_legend_handles_labels(), loc="outside lower right", ncols=3, frameon=False, fontsize=8)
    _plain(states, "The longest pair, token by token")
    return figure


def _plain(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=9)
    axes.tick_params(labelsize=8)
    plain_axes(axes)


def _draw_pattern(figure: Figure, axes: Axes, pattern: Tensor) -> None:
    """Draw attention weights (queries, keys); keys that a query does not see are grey."""
    from matplotlib.colors import PowerNorm

    shown = numpy.ma.masked_equal(pattern.numpy(), 0)  # a weight is 0 only where a query does not see the key
    # Most weights are small, and the square root spreads them over the colours.
    norm = PowerNorm(0.5, vmin=0, vmax=1)
    image = axes.imshow(shown, cmap=_colors(), norm=norm, interpolation="none")
    # The first key, on which many heads rest, would be a line as wide as a pixel at the very edge.
    left = -1 - FIRST_KEY_WIDTH * len(shown)
    right = len(shown) - 0.5
    axes.imshow(shown[:, :1], cmap=_colors(), norm=norm, interpolation="none", extent=(left, 0.5, right, -0.5))
    axes.set_xlim(left, right)
    axes.set_title("Attention", loc="left", fontsize=9)
    axes.set_xlabel("position of the key [tokens]", fontsize=9)
    axes.set_ylabel("of the query [tokens]", fontsize=9)
    axes.tick_params(labelsize=8)
    bar = add_bar(figure, image, [axes], "weight (square-root scale)", "neither")
    bar.set_ticks([0, 0.05, 0.2, 0.5, 1])


# --- pairs on an axis ------------------------------------------------------------------------------------------------


def pair_ticks(inv_freq: Tensor) -> dict[int, str]:
    """Return a few pairs, the first and the last among them, with wavelength [tokens] and number."""
    from matplotlib.ticker import EngFormatter

    waves = wavelength(inv_freq.double()).tolist()
    short = EngFormatter(places=1, sep="")
    ticks = {}
    for pair in numpy.linspace(0, len(waves) - 1, 5).round().astype(int).tolist():
        wave = "∞"
        if not math.isinf(waves[pair]):
            wave = short(waves[pair])
        ticks[pair] = f"{wave}\n({pair})"
    return ticks


def bound_edges(inv_freq: Tensor, context: int) -> list[float]:
    """Return where the frequency bound lies: between pairs of which one makes a full turn and the other does not.

    >>> from rope_patch.frequencies import geometric
    >>> bound_edges(geometric(1e4, 32), 2048)  # Phi-1: pairs 11 to 15 make none
    [10.5]
    """
    partial = (inv_freq.double() < offset_frequency_bound(context)).tolist()
    return [i + 0.5 for i in range(len(partial) - 1) if partial[i] != partial[i + 1]]


# --- parts of heat maps ----------------------------------------------------------------------------------------------


def _draw(axes: Axes, panel: Map, norm: Normalize) -> Any:
    values = numpy.ma.masked_invalid(panel.values.numpy())
    image = axes.imshow(values, cmap=_colors(), norm=norm, interpolation="none", aspect="auto")
    axes.set_title(panel.name, loc="left", fontsize=9, pad=12 if panel.edges else 4)
    axes.set_xticks(list(panel.ticks), list(panel.ticks.values()))
    axes.set_yticks(list(panel.rows), list(panel.rows.values()))
    axes.tick_params(labelsize=8)
    for edge in panel.edges:
        axes.axvline(edge, color=COLORS[1], linewidth=1.6)
        above: Any = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom"}
        axes.annotate(BOUND_LABEL, (edge, 1.01), fontsize=7, color="0.25", **above)
    return image


def _colors() -> Any:
    from matplotlib import colormaps

    return colormaps["viridis"].with_extremes(bad="0.88")


def _scale(panels: Sequence[Tensor], limits: tuple[float, float] | None) -> tuple[Normalize, str]:
    """Return the ends of the colours, and on which side values lie beyond them."""
    from matplotlib.colors import Normalize

    if limits is not None:
        return Normalize(*limits), "neither"
    values = numpy.concatenate([panel.numpy().ravel() for panel in panels])
    # NaN stands for what was not measured, and has no place on the scale.
    top = float(numpy.nanmax(values))
    quantile = float(numpy.nanquantile(values, COLOUR_QUANTILE))
    if 0 < 1.5 * quantile < top:
        return Normalize(0.0, quantile), "max"
    return Normalize(0.0, top), "neither"


def add_bar(figure: Figure, image: Any, axes: Sequence[Axes], label: str, extend: str) -> Any:
    """Add a colour bar below panels of a figure."""
    from matplotlib.ticker import MaxNLocator

    place: Any = {"location": "bottom", "aspect": 30, "fraction": 0.06, "pad": 0.02}
    bar = figure.colorbar(image, ax=list(axes), extend=extend, ticks=MaxNLocator(4), **place)
    bar.set_label(label, fontsize=9)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
    return bar


def few(numbers: Sequence[int]) -> dict[int, str]:
    """Return about eight numbers as text by their place, at an even step.

    >>> list(few(range(6))), list(few(range(30)))
    ([0, 1, 2, 3, 4, 5], [0, 4, 8, 12, 16, 20, 24, 28])
    """
    step = max(1, round(len(numbers) / 8))
    return {place: str(numbers[place]) for place in range(0, len(numbers), step)}
