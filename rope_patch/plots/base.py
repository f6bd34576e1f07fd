"""Figures from arrays; nothing here touches a model. Needs matplotlib (``pip install "rope_patch[plots]"``)."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from rope_patch.frequencies import unrotated, wavelength


def perplexity_by_position(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, trained_length: int, title: str
) -> Figure:
    """Draw perplexity against position, a line per method, best at the end first in the legend.

    A method's line looks the same in every figure with the same methods in the same order. There are no error bands:
    all methods read the same text, so bands of their own would overlap where paired differences do not.

    Args:
        curves: method to positions [tokens] and perplexities, of equal length.
        trained_length: the context the model was trained at, drawn as a line if the curves get there [tokens].
        title: of the figure.
    """
    figure, axes = new_figure(title)
    styles = dict(zip(curves, line_styles(len(curves)), strict=True))
    for name in sorted(curves, key=lambda name: curves[name][1][-1]):
        positions, values = curves[name]
        marker = "o" if len(values) == 1 else ""  # a line of one point is none
        axes.plot(positions, values, marker=marker, label=f"{wrapped(name, 30)}  ({values[-1]:.3g})", **styles[name])
    if trained_length <= max(positions[-1] for positions, _ in curves.values()):
        axes.axvline(trained_length, color="0.4", linewidth=1, linestyle=":")
        at = (trained_length, 1)
        axes.annotate(" trained length", at, xycoords=("data", "axes fraction"), va="top", color="0.4", fontsize=9)
    axes.set(xlabel="position [tokens]", ylabel="perplexity (log scale)", yscale="log")
    axes.yaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
    axes.yaxis.set_minor_formatter(matplotlib.ticker.LogFormatter(minor_thresholds=(2, 0.5)))
    add_legend(axes, "method (at the end)")
    return figure


def wavelength_changes(tables: Mapping[str, Tensor], *, before: Tensor | None, context: int, title: str) -> Figure:
    """Draw the wavelengths of each table over those of the one before, a panel per table.

    Args:
        tables: name to inv_freq: (pairs,) [rad/token].
        before: inv_freq: (pairs,) of the table they all started from, if known [rad/token].
        context: length at which a pair makes one full turn, drawn as a line [tokens].
        title: of the figure.
    """
    figure, panels = new_panels(list(tables), title, width=2.3, height=1.5)
    shown = [*tables.values(), *([] if before is None else [before])]
    top = 3 * max(
        [float(context), *(float(wavelength(t.double())[~unrotated(t)].max()) for t in shown if not unrotated(t).all())]
    )
    for axes, table in zip(panels, tables.values(), strict=True):
        for values, style in ((before, {"color": "0.7", "linewidth": 3}), (table, {"color": COLORS[0]})):
            if values is not None:
                lengths, turning = wavelength(values.double()), ~unrotated(values)
                axes.plot(turning.nonzero().flatten(), lengths[turning], **style)
        rest = unrotated(table).nonzero().flatten()
        axes.plot(rest, [top] * len(rest), marker="^", markersize=4, linestyle="", color=COLORS[0])
        axes.axhline(context, color="0.4", linewidth=1, linestyle=":")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set(yscale="log", ylim=(1, 2.5 * top))
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4, integer=True))
    figure.supxlabel("pair (fast to slow)", fontsize=10)
    figure.supylabel("wavelength [tokens]", fontsize=10)
    return figure


def retrieval_heatmap(
    grids: Mapping[str, Sequence[Sequence[float]]],
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    title: str,
    label: str = "exact match",
    limits: tuple[float, float] = (0.0, 1.0),
    digits: int = 2,
    rows: str = "depth of the needle",
) -> Figure:
    """Draw a score over lengths × depths, a panel per method, the number in each cell, all on one scale of colour.

    Args:
        grids: method to scores: (depths, lengths). A score that is not finite has no colour.
        lengths: of the prompts, left to right [tokens].
        depths: of the needle, top to bottom; 0 for the start of the prompt.
        title: of the figure.
        label: of the score.
        limits: scores at the ends of the colours.
        digits: after the point.
        rows: what the depths are of.
    """
    width, height = 0.6 + 0.52 * len(lengths), 0.5 + 0.27 * len(depths)
    figure, panels = new_panels(list(grids), title, width=max(1.6, width), height=height)
    colors = matplotlib.colormaps["cividis"].with_extremes(bad="0.9")
    for axes, grid in zip(panels, grids.values(), strict=True):
        values = numpy.ma.masked_invalid(numpy.asarray(grid, dtype=float))
        mesh = axes.pcolormesh(values, cmap=colors, vmin=limits[0], vmax=limits[1], edgecolors="white", linewidth=1)
        for (row, column), value in numpy.ndenumerate(numpy.asarray(grid, dtype=float)):
            dark = math.isfinite(value) and value - limits[0] < (limits[1] - limits[0]) / 2
            text = f"{value:z.{digits}f}".replace("-", "\N{MINUS SIGN}").replace("inf", "\N{INFINITY}")
            ink = "white" if dark else "black"
            axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=8, color=ink)
        axes.set_xticks([i + 0.5 for i in range(len(lengths))], [_tokens(length) for length in lengths])
        axes.set_yticks([i + 0.5 for i in range(len(depths))], [f"{100 * depth:.3g} %" for depth in depths])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_ylim(len(depths), 0)
    figure.supxlabel("prompt length [tokens]", fontsize=10)
    figure.supylabel(rows, fontsize=10)
    figure.colorbar(mesh, ax=panels, label=label, aspect=30, fraction=0.04, pad=0.02).outline.set_visible(False)
    return figure


def shares_beside_perplexity(
    groups: Mapping[str, Mapping[str, tuple[float, tuple[float, float], Sequence[float]]]],
    *,
    title: str,
    share: str,
    perplexity: str,
) -> Figure:
    """Draw a share with its interval beside perplexity, a line per arm, a row of panels per group.

    Args:
        groups: group to arm to (share, its interval, perplexity of each seed).
        title: of the figure.
        share: what the share is of.
        perplexity: of what.
    """
    sizes = [len(arms) for arms in groups.values()]
    figure = Figure(figsize=(9, 0.9 + 0.36 * sum(sizes)), layout="constrained")
    grid = figure.subplots(len(groups), 2, squeeze=False, sharex="col", height_ratios=sizes)
    for (name, arms), (left, right) in zip(groups.items(), grid, strict=True):
        for i, (value, (low, high), perplexities) in enumerate(arms.values()):
            left.plot([low, high], [i, i], color=COLORS[0], linewidth=2, solid_capstyle="butt")
            left.plot(value, i, marker="o", color=COLORS[0])
            right.plot(perplexities, [i] * len(perplexities), marker="o", linestyle="", color=COLORS[1], alpha=0.6)
        left.set_yticks(range(len(arms)), [wrapped(arm, 24) for arm in arms])
        right.set_yticks(range(len(arms)), [""] * len(arms))
        left.set_title(name, loc="left", fontsize=10)
        for axes in (left, right):
            axes.set_ylim(len(arms) - 0.5, -0.5)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(True, axis="both", color="0.92")
            axes.set_axisbelow(True)
    grid[-1][0].set(xlabel=share, xlim=(-0.03, 1.03))
    grid[-1][1].set(xlabel=f"{perplexity} (log scale), a point per seed", xscale="log")
    grid[-1][1].xaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
    grid[-1][1].xaxis.set_minor_formatter(matplotlib.ticker.LogFormatter(minor_thresholds=(2, 0.5)))
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def factors_by_wavelength(tables: Mapping[str, Tensor], *, before: Tensor, context: int, title: str) -> Figure:
    """Draw by what each table divides the frequencies it was made from, against their wavelengths, a line per table.

    Pairs that a table stops have no factor: they are triangles at the upper edge.

    Args:
        tables: name to inv_freq: (pairs,) [rad/token].
        before: inv_freq: (pairs,) of the table that all were made from [rad/token].
        context: length at which a pair makes one full turn, drawn as a line [tokens].
        title: of the figure.
    """
    figure, axes = new_figure(title)
    styles = dict(zip(tables, line_styles(len(tables)), strict=True))
    moving = ~unrotated(before)
    lengths = wavelength(before)[moving]
    factors = {name: (before / table)[moving] for name, table in tables.items()}
    highest = 1.5 * max(
        float(values[values.isfinite()].max()) for values in factors.values() if values.isfinite().any()
    )
    for name, values in factors.items():
        turns = values.isfinite()
        axes.plot(lengths[turns].numpy(), values[turns].numpy(), label=wrapped(name, 30), marker=".", **styles[name])
        if not turns.all():
            rest = lengths[~turns]
            axes.plot(rest.numpy(), [highest] * len(rest), linestyle="", marker="^", color=styles[name]["color"])
    axes.axvline(context, color="0.4", linewidth=1, linestyle=":")
    axes.annotate(f" one turn in {context} tokens", (context, 0), xycoords=("data", "axes fraction"), va="bottom",
                  color="0.4", fontsize=9)  # fmt: skip
    axes.set(xlabel="wavelength before [tokens], log scale", ylabel="factor on the wavelength, log scale")
    axes.set(xscale="log", yscale="log")
    axes.margins(y=0.12)  # room for the words on the dotted line
    low, high = axes.get_ylim()
    if high / low < 1.5:  # a logarithmic scale would have no ticks there
        axes.set(yscale="linear", ylabel="factor on the wavelength")
    else:
        axes.yaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
        axes.yaxis.set_minor_formatter(matplotlib.ticker.LogFormatter(minor_thresholds=(2, 0.5)))
    add_legend(axes, "table (▲: pairs it stops)")
    return figure


def svg(figure: Figure) -> str:
    """Return a figure as an SVG document that needs no fonts; figures made alike give the same text."""
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "rope_patch", "svg.fonttype": "path"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


# Okabe & Ito's colours, which colour-blind readers can distinguish; without their yellow, which is too pale for a line.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def new_figure(title: str) -> tuple[Figure, Axes]:
    """Return an empty figure with a title, and its axes."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, which="major", color="0.92")
    axes.set_axisbelow(True)
    return figure, axes


def new_panels(names: Sequence[str], title: str, *, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Panels of so many inches with the same scales, a row of them at most 10 wide, their names above."""
    down = math.ceil(len(names) / max(1, min(4, int(10 / width))))
    across = math.ceil(len(names) / down)  # rows as even as can be
    labels = [wrapped(name, int(12 * width)) for name in names]
    lines = max(label.count("\n") + 1 for label in labels)
    size = (max(4.5, across * width + 1.2), down * (height + 0.16 * lines) + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    panels = list(grid.flat)
    for axes, label in zip(panels, labels, strict=False):
        axes.set_title(label, fontsize=9, loc="left")
        axes.tick_params(labelsize=8)
    for i, axes in enumerate(panels[len(names) :], start=len(names)):  # the panel above such a hole ends its column
        axes.remove()
        panels[i - across].tick_params(labelbottom=True)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure, panels[: len(names)]


def line_styles(count: int) -> list[dict[str, Any]]:
    """Distinct lines: all colours, then the same ones dashed, then dotted."""
    size = len(COLORS)
    return [
        {"color": COLORS[i % size], "linestyle": ("-", "--", ":")[i // size % 3], "linewidth": 1.6}
        for i in range(count)
    ]


def wrapped(name: str, width: int) -> str:
    """Break a long name after its signs, at about so many characters; a dollar is a dollar, not mathematics."""
    lines = [""]
    for piece in re.findall(rf"[^+:/;]{{1,{width}}}[+:/;]?|[+:/;]", name):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines).replace("$", r"\$")


def _tokens(length: int) -> str:
    """Return a length in short form: 4096 is 4k."""
    return f"{length // 1024}k" if length >= 4096 and length % 1024 == 0 else str(length)


def add_legend(axes: Axes, title: str) -> None:
    """Add a legend beside the axes."""
    axes.legend(title=title, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9, alignment="left")
