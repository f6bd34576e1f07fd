"""Figures of quantized caches: arrays in, matplotlib Figure out. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rope_patch.reports.plots.base import (
    new_panels,
    plain_axes,
    shared_legend,
    signed_percent,
    wrapped_name,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERDICTS = {"safe": ("o", "#009E73"), "undecided": ("^", "#E69F00"), "unsafe": ("X", "#D55E00"), "": ("s", "0.35")}
"""Marker and colour of each verdict; full precision has none."""
LINEAR_LIMIT = 1.0
"""A change of perplexity that is drawn in proportion; larger ones by their logarithm [%]."""


class Cost(NamedTuple):
    """What a format costs.

    Attributes:
        format: the name of the format.
        bits: the number of bits per element of the cache.
        value: the change that the format causes; not finite where there is none.
        low: the lower end of the change's interval; not finite where there is none.
        high: the upper end of the change's interval.
        verdict: the verdict: ``"safe"``, ``"undecided"`` or ``"unsafe"``; empty for full precision.
    """

    format: str
    bits: float
    value: float
    low: float
    high: float
    verdict: str


def costs(
    panels: Mapping[str, Sequence[Cost]], *, title: str, xlabel: str, logarithmic: bool, limit: float | None = None
) -> Figure:
    """Draw what formats cost with its interval, a row per format from most to fewest bits, a panel per method.

    Args:
        panels: the costs of the formats, by method.
        title: the title of the figure.
        xlabel: the label of the costs, with their unit.
        logarithmic: whether changes beyond ±:data:`LINEAR_LIMIT` are drawn by their logarithm.
        limit: the largest change that is tolerated, drawn as a line.
    """
    from matplotlib.lines import Line2D

    bits = {cost.format: cost.bits for costs in panels.values() for cost in costs}
    rows = {name: i for i, name in enumerate(sorted(bits, key=lambda name: -bits[name]))}
    figure, grid = new_panels(list(panels), title, width=3.2, height=0.5 + 0.3 * len(rows))
    for axes, costs in zip(grid, panels.values(), strict=True):
        axes.axvline(0, color="0.6", linewidth=0.8)
        if limit is not None:
            axes.axvline(limit, color="0.4", linewidth=1, linestyle=":")
        for cost in costs:
            marker, color = VERDICTS[cost.verdict]
            # An interval without finite ends, or without a width, has no line to draw.
            if -math.inf < cost.low < cost.high < math.inf:
                axes.plot([cost.low, cost.high], [rows[cost.format]] * 2, color=color, linewidth=1.6, alpha=0.6)
            if math.isfinite(cost.value):
                axes.plot(cost.value, rows[cost.format], marker=marker, markersize=6, linestyle="", color=color)
        if logarithmic:
            axes.set_xscale("symlog", linthresh=LINEAR_LIMIT)
            signed_percent(axes.xaxis)
        axes.margins(x=0.08)
        plain_axes(axes)
    names = [f"{wrapped_name(name, 28)} ({bits[name]:.3g} bits)" for name in rows]
    grid[0].set_yticks(range(len(names)), names)
    grid[0].set_ylim(len(names) - 0.5, -0.5)
    figure.supxlabel(xlabel, fontsize=10)
    verdicts = {cost.verdict for costs in panels.values() for cost in costs}
    signs = {name or "full precision": look for name, look in VERDICTS.items() if name in verdicts}
    dots: dict[str, Any] = {
        name: Line2D([], [], color=color, marker=marker, linestyle="", markersize=6)
        for name, (marker, color) in signs.items()
    }
    shared_legend(figure, dots)
    return figure
