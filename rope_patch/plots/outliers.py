"""Figures of rotary outliers, mean logits and values of p: arrays in, matplotlib Figure out. Needs matplotlib.

*Source*: Jonasson, arXiv:2503.01832, figures 2, 5-8, 10 and 11.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from torch import Tensor

from rope_patch.analysis.outliers import Scatter
from rope_patch.frequencies import unrotated, wavelength
from rope_patch.plots.analysis import BOUND, add_bar, draw_pattern, spread, waved
from rope_patch.plots.base import COLORS, wrapped
from rope_patch.plots.theory import without_spines

MANY = 600
"""Points from here on are drawn as pixels."""
NEAR = 32
"""Distances whose logits are drawn one by one [tokens]."""
DOTS = 160
"""Of what is drawn as pixels, per inch."""


def radius_angle(points: Scatter, cuts: Mapping[str, float], *, title: str) -> Figure:
    """Draw the radius of every pair against its turns and its angle, with both bounds (Jonasson, figures 8 and 11).

    The angle bound is another one for each pair: a third column shows angles less their own bound.

    Args:
        points: of every pair of every head.
        cuts: ``"key"`` and ``"query"`` to the radius above which a pair is an outlier.
        title: of the figure.
    """
    figure = Figure(figsize=(10, 3.0 * len(cuts) + 0.5), layout="constrained", dpi=DOTS)
    axes = figure.subplots(len(cuts), 3, squeeze=False, sharey="row", sharex="col")
    kinds = _Kinds(points)
    at = (kinds.turns, points.phi.numpy(), (points.phi - points.angle).numpy())
    names = (
        "turns within the context [turns]",
        "angle φ of the mean key [rad]",
        "φ less the bound of its pair [rad]",
    )
    for row, (states, cut) in enumerate(cuts.items()):
        radius = points.radius(states).numpy()
        for column, values in enumerate(at):
            panel = axes[row][column]
            without_spines(panel)
            kinds.draw(panel, values, radius, only_partial=column == 2)
            panel.axhline(cut, color="0.25", linewidth=0.9, linestyle=":")
            panel.tick_params(labelsize=8)
            panel.set_xlabel(names[column] if row == len(cuts) - 1 else "", fontsize=9)
        axes[row][0].set_ylabel(f"length of the mean {states}", fontsize=9)
        axes[row][0].set_ylim(bottom=0)
        axes[row][2].annotate(" outliers above", (0, cut), xycoords=("axes fraction", "data"), fontsize=7, color="0.25",
                              va="bottom")  # fmt: skip
        axes[row][0].axvline(1, color="0.25", linewidth=1, linestyle="--")
        axes[row][2].axvline(0, color="0.25", linewidth=1, linestyle="--")
    axes[0][0].set_xscale("log")
    axes[0][0].set_title(f"Frequency bound: below one turn ({BOUND})", loc="left", fontsize=9)
    axes[0][1].set_title("Angle", loc="left", fontsize=9)
    axes[0][2].set_title("Angle bound: offset features right of 0", loc="left", fontsize=9)
    axes[0][1].set_xlim(-0.15, 2 * math.pi + 0.15)
    axes[0][1].set_xticks([i * math.pi / 2 for i in range(5)], ["0", "π/2", "π", "3π/2", "2π"])
    axes[0][2].set_xlim(-2 * math.pi, math.pi)
    axes[0][2].set_xticks([i * math.pi for i in (-1, 0, 1)], ["−π", "0", "π"])
    kinds.explain(figure, list(axes.flat))
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def deviation(points: Scatter, *, title: str) -> Figure:
    """Draw the circular standard deviation of every pair against its radius (Jonasson, figure 2)."""
    figure = Figure(figsize=(10, 3.3), layout="constrained", dpi=DOTS)
    left, right = figure.subplots(1, 2, sharey=True)
    kinds = _Kinds(points)
    for panel, states in ((left, "key"), (right, "query")):
        without_spines(panel)
        spread = points.key_deviation if states == "key" else points.query_deviation
        kinds.draw(panel, points.radius(states).numpy(), spread.numpy())
        panel.set_xlabel(f"length of the mean {states}", fontsize=9)
        panel.set_xlim(left=0)
        panel.set_ylim(bottom=0)
        panel.tick_params(labelsize=8)
    left.set_ylabel("circular standard deviation [rad]", fontsize=9)
    kinds.explain(figure, [left, right])
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def mean_logits(
    distances: Tensor,
    total: Tensor,
    terms: Mapping[int, Tensor],
    left_out: Sequence[int],
    pattern: Tensor,
    paths: Mapping[int, tuple[Tensor, Tensor, Tensor]],
    *,
    inv_freq: Tensor,
    title: str,
) -> Figure:
    """Draw what the mean query and key of a head say about distance (Jonasson, figures 5 to 7 and 10).

    Args:
        distances: (distances,) [tokens].
        total: (distances,) logit of the mean query with the mean key.
        terms: the pairs drawn, to what each adds: (distances,).
        left_out: pairs among them to leave out, one at a time.
        pattern: (queries, positions) attention of the mean query to the mean key.
        paths: pair to the mean query at successive positions (positions, 2), those positions [tokens], and keys of
            sinks at theirs (sinks, 2).
        inv_freq: (pairs,) [rad/token].
        title: of the figure.
    """
    figure = Figure(figsize=(10, 6.3), layout="constrained", dpi=DOTS)
    spec = figure.add_gridspec(2, 3, height_ratios=(1.08, 1))
    styles = {pair: COLORS[i % (len(COLORS) - 1)] for i, pair in enumerate(terms)}
    waves = wavelength(inv_freq.double()).tolist()
    names = {pair: f"pair {pair} ({waved(waves[pair])} tokens)" for pair in (*terms, *paths)}
    x = distances.numpy()
    lines: dict[str, Any] = {}
    whole, without = figure.add_subplot(spec[0, 0]), figure.add_subplot(spec[0, 1])
    sums = (whole, list(terms), "Sum, and its longest pairs"), (without, left_out, "Sum, one pair left out")
    for axes, chosen, name in sums:
        for pair in chosen:
            values = terms[pair] if axes is whole else total - terms[pair]
            lines[names[pair]] = _wave(axes, x, values.numpy(), styles[pair])
        lines["all pairs"] = _wave(axes, x, total.numpy(), "black", whole=True)
        axes.set_xscale("symlog", linthresh=1, linscale=0.4)
        axes.set_title(name, loc="left", fontsize=9)
        axes.set_xlabel("distance [tokens], log scale from 1 on", fontsize=9)
        axes.set_xlim(0, float(x[-1]))
        _whole_ticks(axes, float(x[-1]))
        without_spines(axes)
        axes.tick_params(labelsize=8)
    whole.set_ylabel("logit of the mean query and key", fontsize=9)
    figure.legend(list(lines.values()), list(lines), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    draw_pattern(
        figure, figure.add_subplot(spec[0, 2]), pattern, window=None, title="Attention that this alone would give"
    )
    dots: Any = None
    last = max((float(positions[-1]) for _, positions, _ in paths.values()), default=1.0)
    panels = []
    for column, (pair, (path, positions, keys)) in enumerate(paths.items()):
        axes = figure.add_subplot(spec[1, column])
        dots = _orbit(axes, path, positions, keys, last)
        axes.set_title(names[pair], loc="left", fontsize=9)
        axes.set_ylabel("second feature / length" if not column else "", fontsize=9)
        panels.append(axes)
    if dots is not None:
        add_bar(figure, dots, panels, "position of the mean query [tokens]", "neither", vertical=True)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def shares(
    tried: Sequence[float],
    carried: Mapping[str, Sequence[float]],
    rises: Mapping[str, Sequence[tuple[float, float, float]]],
    *,
    title: str,
) -> Figure:
    """Draw what the pairs that each p stops carry, and the rise of perplexity that stopping them costs.

    Args:
        tried: values of p.
        carried: name to shares (0 to 1), one per p.
        rises: positions to estimate, lower and upper end of the rise, relative, one per p.
        title: of the figure.
    """
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, values), color in zip(carried.items(), COLORS, strict=False):
        left.plot(tried, [100 * value for value in values], marker="o", markersize=4, color=color, label=name)
    shift = 0.006 * (len(rises) - 1)
    for i, ((name, ends), color) in enumerate(zip(rises.items(), COLORS, strict=False)):
        at = [p - shift + 0.012 * i for p in tried]
        known = [end if math.isfinite(end[0]) else (math.nan,) * 3 for end in ends]  # the others are not drawn
        middle, low, high = (numpy.array([100 * end[j] for end in known]) for j in range(3))
        errors = numpy.nan_to_num(numpy.stack((middle - low, high - middle)), posinf=0.0)
        right.errorbar(
            at, middle, yerr=errors, marker="o", markersize=4, capsize=3, color=color, label=wrapped(name, 40)
        )
    left.set(ylabel="share carried by stopped pairs [%]", ylim=(0, 100))
    right.set(ylabel="change of perplexity [%],\nlinear within ±1 %", yscale="symlog")
    right.axhline(0, color="0.4", linewidth=0.8)
    right.yaxis.set_major_formatter(
        matplotlib.ticker.FuncFormatter(lambda x, _: f"{x:+g}".replace("-", "−") if x else "0")
    )
    for axes in (left, right):
        axes.set(xlabel="p, the share of pairs that keep turning", xlim=(1.04, -0.04))
        without_spines(axes)
        axes.tick_params(labelsize=8)
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


# --- points ----------------------------------------------------------------------------------------------------------


class _Kinds:
    """Pairs by the frequency bound: those with full turns in grey, others by wavelength, unrotated ones in black."""

    def __init__(self, points: Scatter) -> None:
        self.unrotated = unrotated(points.inv_freq).numpy()
        self.partial = points.partial.numpy() & ~self.unrotated
        self.full = ~points.partial.numpy()
        self.waves = wavelength(points.inv_freq).numpy()
        turns = ((points.angle - math.pi) / math.pi).numpy()  # angle = π + L f / 2, turns = L f / 2π
        lowest = float(turns[~self.unrotated].min()) if (~self.unrotated).any() else 1.0
        self.turns = numpy.where(self.unrotated, lowest / 3, turns)  # the scale has no 0: they stand at its end
        ends = self.waves[self.partial]
        low, high = (float(ends.min()), float(ends.max())) if len(ends) else (1.0, 10.0)
        self.norm = LogNorm(low, high if high > low else 2 * low)
        self.colors = matplotlib.colors.ListedColormap(matplotlib.colormaps["viridis"](numpy.linspace(0, 0.93, 256)))

    def draw(self, axes: Axes, x: Any, y: Any, *, only_partial: bool = False) -> None:
        options: dict[str, Any] = {"s": 7, "linewidths": 0, "rasterized": len(x) >= MANY}
        if not only_partial:
            axes.scatter(x[self.full], y[self.full], color="0.72", **options)
        by = {"c": self.waves[self.partial], "cmap": self.colors, "norm": self.norm}
        axes.scatter(x[self.partial], y[self.partial], **by, **options)
        if not only_partial:
            axes.scatter(x[self.unrotated], y[self.unrotated], color="black", marker="^", **{**options, "s": 14})

    def explain(self, figure: Figure, panels: Sequence[Axes]) -> None:
        """Draw the legend of the colours."""
        if self.partial.any():
            shown = matplotlib.cm.ScalarMappable(self.norm, self.colors)
            lengths = sorted(set(self.waves[self.partial].tolist()))
            ticks = [lengths[i] for i in spread(len(lengths), 7)]
            bar = add_bar(figure, shown, panels, "wavelength [tokens]", "neither", vertical=True, ticks=ticks)
            bar.ax.minorticks_off()
            bar.ax.set_yticks(ticks, [waved(tick) for tick in ticks])
        dot: dict[str, Any] = {"marker": "o", "linestyle": "", "markersize": 4}
        legend = {}
        if self.full.any():
            legend["makes full turns"] = matplotlib.lines.Line2D([], [], color="0.72", **dot)
        if self.unrotated.any():
            legend["unrotated"] = matplotlib.lines.Line2D([], [], color="black", **{**dot, "marker": "^"})
        if legend:
            figure.legend(
                list(legend.values()), list(legend), loc="outside lower left", ncols=2, frameon=False, fontsize=8
            )


# --- small parts -----------------------------------------------------------------------------------------------------


def _orbit(axes: Axes, path: Tensor, positions: Tensor, keys: Tensor, last: float) -> Any:
    """Draw a mean query's path around the plane, and keys of sinks, each kind relative to its longest."""
    axes.add_patch(Circle((0, 0), 1, fill=False, color="0.85", linewidth=0.8))
    axes.axhline(0, color="0.9", linewidth=0.8)
    axes.axvline(0, color="0.9", linewidth=0.8)
    x, y = (path / path.norm(dim=-1).amax().clamp_min(1e-30)).T.numpy()
    style: dict[str, Any] = {"vmin": 0, "vmax": last, "cmap": "viridis", "rasterized": True, "linewidths": 0}
    dots = axes.scatter(x, y, c=positions.numpy(), s=9, **style)
    axes.annotate("start", (x[0], y[0]), (4, 4), textcoords="offset points", fontsize=8)
    scaled = keys / keys.norm(dim=-1).amax().clamp_min(1e-30) if len(keys) else keys
    for number, (across, up) in enumerate(scaled.tolist(), start=1):
        axes.plot([0, across], [0, up], color=COLORS[1], linewidth=0.9)
        axes.plot(across, up, marker="s", markersize=4, color=COLORS[1])
        axes.annotate(str(number), (across, up), (3, -8), textcoords="offset points", fontsize=8, color=COLORS[1])
    axes.set(xlim=(-1.25, 1.25), ylim=(-1.25, 1.25), aspect="equal")
    axes.set_xlabel("first feature / length", fontsize=9)
    axes.set_xticks([-1, 0, 1])
    axes.set_yticks([-1, 0, 1])
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return dots


def _wave(axes: Axes, x: Any, y: Any, color: str, *, whole: bool = False) -> Any:
    """Draw values over distance: one by one while they are distinguishable, then means, and the range of the whole."""
    near, width = x < NEAR, 1.5 if whole else 1.1
    line = axes.plot(x[near], y[near], color=color, linewidth=width)[0]
    if not near.all():
        edges = numpy.geomspace(NEAR, float(x[-1]) + 1, 13)
        bins = numpy.digitize(x, edges)
        parts = [(x[bins == i], y[bins == i]) for i in range(1, len(edges)) if (bins == i).any()]
        at = [numpy.exp(numpy.log(place).mean()) for place, _ in parts]
        axes.plot(at, [values.mean() for _, values in parts], color=color, linewidth=width, linestyle="--")
        if whole:
            ends = [values.min() for _, values in parts], [values.max() for _, values in parts]
            axes.fill_between(at, *ends, color=color, alpha=0.12, linewidth=0)
    return line


def _whole_ticks(axes: Axes, last: float) -> None:
    ticks = [0, 1, *(10**i for i in range(1, 1 + int(math.log10(max(last, 1)))))]
    axes.set_xticks(ticks, [waved(tick) if tick >= 1000 else str(tick) for tick in ticks])
    axes.minorticks_off()
