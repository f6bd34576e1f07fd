"""Figures of rotary outliers and values of p: arrays in, matplotlib Figure out. Needs matplotlib.

*Source*: Jonasson, arXiv:2503.01832, figures 8 and 11; Barbero et al., arXiv:2410.06205, section 6.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from rope_patch.analysis.outliers import Scatter
from rope_patch.frequencies import unrotated, wavelength
from rope_patch.reports.plots.analysis import BOUND_LABEL, add_bar, spread
from rope_patch.reports.plots.base import COLORS, WIDTH, add_title, plain, signed_percent, waved, wrapped

MANY_POINTS = 600
"""Number of points from which on they are drawn as pixels, which keeps the file small."""
DOTS_PER_INCH = 160
"""Resolution of what is drawn as pixels [dots per inch]."""


def radius_angle(points: Scatter, cuts: Mapping[str, float], *, title: str) -> Figure:
    """Draw the length of every pair's mean against its turns and against its angle less the bound of its own.

    Pairs with full turns are grey, others have the colour of their wavelength, and unrotated pairs are black triangles
    at the left end of the turns, whose scale has no 0.

    *Source*: Jonasson, figures 8 and 11; the angle bound differs from pair to pair, so it is subtracted.

    Args:
        points: the mean query and mean key of every pair of every head.
        cuts: the lengths above which a pair is an outlier, for ``"key"`` and ``"query"``.
        title: the title of the figure.
    """
    figure = Figure(figsize=(WIDTH, 2.8 * len(cuts) + 0.5), layout="constrained", dpi=DOTS_PER_INCH)
    axes = figure.subplots(len(cuts), 2, squeeze=False, sharey="row", sharex="col")
    rests, waves = unrotated(points.inv_freq).numpy(), wavelength(points.inv_freq).numpy()
    full = ~points.partial.numpy()
    partial = ~full & ~rests
    turns = ((points.angle - math.pi) / math.pi).numpy()  # angle = π + L f / 2, turns = L f / 2π
    turns = numpy.where(rests, turns[~rests].min(initial=1.0) / 3, turns)
    low, high = waves[partial].min(initial=1e30), waves[partial].max(initial=1.0)
    # A scale of colours needs two different ends.
    norm = LogNorm(min(low, high), high if high > low else 2 * high)
    colors = matplotlib.colors.ListedColormap(matplotlib.colormaps["viridis"](numpy.linspace(0, 0.93, 256)))
    beyond = (points.phi - points.angle).numpy()
    dots: dict[str, Any] = {"s": 7, "linewidths": 0, "rasterized": len(waves) >= MANY_POINTS}
    unrotated_label = "unrotated" if rests.any() else None
    by_wave = {"c": waves[partial], "cmap": colors, "norm": norm}
    for (left, right), (states, cut) in zip(axes, cuts.items(), strict=True):
        radius = points.radius(states).numpy()
        left.scatter(turns[full], radius[full], color="0.72", label="makes full turns", **dots)
        left.scatter(turns[rests], radius[rests], color="black", marker="^", label=unrotated_label, **{**dots, "s": 14})
        for panel, x, bound in ((left, turns, 1), (right, beyond, 0)):
            panel.scatter(x[partial], radius[partial], **by_wave, **dots)
            panel.axhline(cut, color="0.25", linewidth=0.9, linestyle=":")
            panel.axvline(bound, color="0.25", linewidth=1, linestyle="--")
            panel.tick_params(labelsize=8)
            plain(panel)
        left.set_ylabel(f"length of the mean {states}", fontsize=9)
        left.set(xscale="log", ylim=(0, None))
        right.annotate(" outliers above", (0, cut), xycoords=("axes fraction", "data"), va="bottom", fontsize=7)
    right.set(xlim=(-2 * math.pi, math.pi))
    right.set_xticks([i * math.pi for i in (-2, -1, 0, 1)], ["−2π", "−π", "0", "π"])
    left.set_xlabel("turns within the context [turns]", fontsize=9)
    right.set_xlabel("angle φ of the mean key less the bound of its pair [rad]", fontsize=9)
    axes[0][0].set_title(f"Frequency bound: below one turn ({BOUND_LABEL})", loc="left", fontsize=9)
    axes[0][1].set_title("Angle bound: offset features right of 0", loc="left", fontsize=9)
    axes[0][0].legend(frameon=False, fontsize=8)
    if partial.any():
        lengths = sorted(set(waves[partial].tolist()))
        ticks = [lengths[i] for i in spread(len(lengths), 7)]
        shown = matplotlib.cm.ScalarMappable(norm, colors)
        bar = add_bar(figure, shown, list(axes.flat), "wavelength [tokens]", "neither", vertical=True)
        bar.ax.minorticks_off()
        bar.set_ticks(ticks, labels=[waved(tick) for tick in ticks])
    add_title(figure, title)
    return figure


def p_sweep(
    tried: Sequence[float],
    carried: Mapping[str, Sequence[float]],
    rises: Mapping[str, Sequence[tuple[float, float, float]]],
    *,
    title: str,
) -> Figure:
    """Draw what the pairs that each p stops carry, and the rise of perplexity that stopping them costs.

    Args:
        tried: the values of p.
        carried: the shares (0 to 1) that the pairs carry, one for each p, by name.
        rises: the relative rises of perplexity, one for each p: estimate, lower and upper end, by positions.
        title: the title of the figure.
    """
    figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, values), color in zip(carried.items(), COLORS, strict=False):
        left.plot(tried, [100 * value for value in values], marker="o", markersize=4, color=color, label=name)
    for i, ((name, ends), color) in enumerate(zip(rises.items(), COLORS, strict=False)):
        at = [p + 0.012 * i for p in tried]  # the intervals stand beside each other
        known = [end if math.isfinite(end[0]) else (math.nan,) * 3 for end in ends]  # NaN is not drawn
        middle, low, high = (numpy.array([100 * end[j] for end in known]) for j in range(3))
        errors = numpy.nan_to_num(numpy.stack((middle - low, high - middle)), posinf=0.0)
        style: dict[str, Any] = {"marker": "o", "markersize": 4, "capsize": 3, "color": color}
        right.errorbar(at, middle, yerr=errors, label=wrapped(name, 40), **style)
    left.set(ylabel="share carried by stopped pairs [%]", ylim=(0, 100))
    right.set(ylabel="change of perplexity [%],\nlinear within ±1 %", yscale="symlog")
    right.axhline(0, color="0.4", linewidth=0.8)
    signed_percent(right.yaxis)
    for axes in (left, right):
        axes.set(xlabel="p, the share of pairs that keep turning", xlim=(1.04, -0.04))
        plain(axes)
        axes.tick_params(labelsize=8)
        axes.legend(frameon=False, fontsize=8)
    add_title(figure, title)
    return figure
