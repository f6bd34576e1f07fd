"""Figures of scores, and what all figures share: arrays in, matplotlib Figure out.

Nothing here touches a model. Every figure is :data:`WIDTH` inches wide, the width of a page of a report.
Needs matplotlib (``pip install "rope_patch[plots]"``).
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from rope_patch.runtime.number_format import number_text

if TYPE_CHECKING:  # a page is printed without matplotlib, which only drawing needs
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 10.0
"""Width of every figure [inches]."""
# Okabe & Ito's colours, which colour-blind readers can distinguish; without their yellow, which is too pale for a line.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":")

Curves = Mapping[str, tuple[Any, Any]]
"""The x and y of each line, of equal length, by its name."""


def perplexity_by_position(curves: Curves, *, trained_length: int, title: str) -> Figure:
    """Draw perplexity against position, see :func:`_lines`."""
    figure, axes = _lines(curves, trained_length, title)
    axes.set(xlabel="position [tokens]", ylabel="perplexity (log scale)", yscale="log")
    few_log_ticks(axes.yaxis)
    return figure


def score_by_length(curves: Curves, *, trained_length: int, title: str) -> Figure:
    """Draw the share of right answers against the length of the prompts, see :func:`_lines`."""
    figure, axes = _lines(curves, trained_length, title)
    axes.set(xlabel="prompt length [tokens]", ylabel="share of right answers", ylim=(0, 1.02))
    return figure


def _lines(curves: Curves, trained_length: int, title: str) -> tuple[Figure, Axes]:
    """Draw a line per method, the lowest at the end last in the legend, and return the figure and its axes.

    There are no error bands: all methods read the same text, so bands of their own would overlap where paired
    differences do not.

    Args:
        curves: the positions or lengths [tokens] and the values of each method.
        trained_length: the context that the model was trained with, drawn as a line if the curves get there [tokens].
        title: the title of the figure.
    """
    figure = new_figure(title, 4.6)
    axes = figure.subplots()
    styles = line_styles(curves)
    for name in sorted(curves, key=lambda name: curves[name][1][-1], reverse=True):
        positions, values = curves[name]
        marker = "o" if len(values) < 8 else ""
        axes.plot(
            positions, values, marker=marker, label=f"{wrapped_name(name, 30)}  ({values[-1]:.3g})", **styles[name]
        )
    if trained_length <= max(positions[-1] for positions, _ in curves.values()):
        mark_position(axes, trained_length, "trained length")
    plain_axes(axes)
    beside: Any = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5), "frameon": False, "fontsize": 9}
    # In the order in which the lines end, from the top.
    axes.legend(title="method (at the end)", alignment="left", **beside)
    return figure, axes


def retrieval_heatmap(
    grids: Mapping[str, Sequence[Sequence[float]]],
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    title: str,
) -> Figure:
    """Draw the share of right answers over lengths × depths, a panel per method, the number in each cell.

    Args:
        grids: (depths, lengths) the shares of each method; one that is not finite has no colour.
        lengths: the prompt lengths, left to right [tokens].
        depths: the depths of the needle, top to bottom; 0 for the start of the prompt.
        title: the title of the figure.
    """
    figure, panels = new_panels(list(grids), title, width=0.6 + 0.52 * len(lengths), height=0.5 + 0.27 * len(depths))
    for axes, grid in zip(panels, grids.values(), strict=True):
        image = axes.imshow(grid, cmap="cividis", vmin=0, vmax=1, interpolation="none", aspect="auto")
        for (row, column), value in numpy.ndenumerate(grid):
            ink = "white" if value < 0.5 else "black"
            axes.text(column, row, number_text(value), ha="center", va="center", fontsize=8, color=ink)
        axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
        axes.set_yticks(range(len(depths)), [f"{100 * depth:.3g} %" for depth in depths])
    figure.supxlabel("prompt length [tokens]", fontsize=10)
    figure.supylabel("depth of the needle", fontsize=10)
    figure.colorbar(image, ax=panels, label="exact match", aspect=30, fraction=0.04, pad=0.02)
    return figure


# --- what all figures share ------------------------------------------------------------------------------------------


def svg(figure: Figure) -> str:
    """Return a figure as an SVG document that needs no fonts; figures made alike give the same text."""
    import matplotlib

    out = io.StringIO()
    # Without the salt and the date, matplotlib would write random identifiers and the time into the file.
    with matplotlib.rc_context({"svg.hashsalt": "rope_patch", "svg.fonttype": "path"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    # To find the layout takes longer than to draw: a PNG of the same figure takes that of the page.
    figure.set_layout_engine("none")
    return out.getvalue()


def new_figure(title: str, height: float, **options: Any) -> Figure:
    """Return an empty figure under a title, which is its title in a report, too; the height is in inches."""
    from matplotlib.figure import Figure

    # Figure, not pyplot, which keeps figures alive and may look for a screen.
    figure = Figure(figsize=(WIDTH, height), layout="constrained", **options)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def new_panels(names: Sequence[str], title: str, *, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Return a figure of panels on the same scales, their names above, in rows that are as even as can be.

    Args:
        names: the names of the panels.
        title: the title of the figure.
        width: the least width of a panel [inches].
        height: the height of a panel [inches].
    """
    down = math.ceil(len(names) / max(1, min(4, int(WIDTH / width))))
    across = math.ceil(len(names) / down)
    labels = [wrapped_name(name, int(12 * (WIDTH - 1.2) / across)) for name in names]
    lines = max(label.count("\n") + 1 for label in labels)
    figure = new_figure(title, down * (height + 0.16 * lines) + 0.9)
    panels = list(figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).flat)
    for axes, label in zip(panels, labels, strict=False):
        axes.set_title(label, fontsize=9, loc="left")
        axes.tick_params(labelsize=8)
    for i, axes in enumerate(panels[len(names) :], start=len(names)):  # the panel above such a hole ends its column
        axes.remove()
        panels[i - across].tick_params(labelbottom=True)
    return figure, panels[: len(names)]


def plain_axes(axes: Axes) -> None:
    """Leave out the lines above and to the right, and draw a light grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, which="major", color="0.92")
    axes.set_axisbelow(True)


def mark_position(axes: Axes, at: float, label: str) -> None:
    """Draw a dotted vertical line with its name at the top."""
    axes.axvline(at, color="0.4", linewidth=1, linestyle=":")
    axes.annotate(f" {label}", (at, 1), xycoords=("data", "axes fraction"), va="top", color="0.4", fontsize=9)


def few_log_ticks(axis: Any) -> None:
    """Write numbers, not powers, on a logarithmic axis, between its decades too where it shows few of them."""
    from matplotlib.ticker import LogFormatter, ScalarFormatter

    axis.set_major_formatter(ScalarFormatter())
    axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))


def line_styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return a distinct line for each name; where a colour comes again, the line is dashed, then dotted."""
    looks = itertools.cycle(itertools.product(DASHES, COLORS))
    return {
        name: {"color": color, "linestyle": dash, "linewidth": 1.5}
        for name, (dash, color) in zip(names, looks, strict=False)
    }


def wrapped_name(name: str, width: int) -> str:
    """Break a long name after its signs, at about so many characters; a dollar is a dollar, not mathematics."""
    lines = [""]
    for piece in re.findall(rf"[^+:/;]{{1,{width}}}[+:/;]?|[+:/;]", name):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines).replace("$", r"\$")
