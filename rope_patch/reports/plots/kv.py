"""Figures of quantized caches: arrays in, matplotlib Figure out. Needs matplotlib.

A format has one colour in all figures that are given the same formats in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from rope_patch.reports.plots.base import (
    line_styles,
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
UNROTATED_STEP = 1.25
"""Factor between the places of neighbouring unrotated pairs, which have no wavelength, on the logarithmic axis."""


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


class Waves(NamedTuple):
    """A panel of errors by wavelength.

    Attributes:
        wavelength: (pairs,) the wavelengths of the pairs; inf for unrotated ones [tokens].
        errors: (pairs,) the errors of each format, by its name.
        context: the context, at which the frequency bound is drawn [tokens].
    """

    wavelength: Tensor
    errors: Mapping[str, Tensor]
    context: int


def errors_by_wavelength(panels: Mapping[str, Waves], formats: Sequence[str], *, title: str) -> Figure:
    """Draw what each pair adds to the error of the logits against its wavelength, a line per format.

    Unrotated pairs stand at the right edge.

    Args:
        panels: the errors of each method, or of each method and kind of layers.
        formats: the names of the formats in the order of their colours.
        title: the title of the figure.
    """
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter, FuncFormatter, LogFormatter, LogLocator

    figure, grid = new_panels(list(panels), title, width=4.0, height=2.6)
    finite = [float(length) for panel in panels.values() for length in panel.wavelength.tolist() if length < math.inf]
    longest = max([*finite, *(panel.context for panel in panels.values())])
    most = max(int(panel.wavelength.isinf().sum()) for panel in panels.values())
    places = [
        3 * longest * UNROTATED_STEP**i for i in range(most)
    ]  # beyond the longest: infinity has no place on a log axis
    styles, lines = line_styles(formats), dict[str, Any]()
    for axes, panel in zip(grid, panels.values(), strict=True):
        unrotated = panel.wavelength.isinf()
        if unrotated.any():
            axes.axvspan(places[0] / UNROTATED_STEP, places[-1] * UNROTATED_STEP, color="0.95", zorder=0)
        for name, values in panel.errors.items():
            shown = values.double().masked_fill(values <= 0, math.nan)  # nor has 0
            style = {**styles[name], "marker": ".", "markersize": 4}
            lines[name] = axes.plot(panel.wavelength[~unrotated].numpy(), shown[~unrotated].numpy(), **style)[0]
            axes.plot(places[: int(unrotated.sum())], shown[unrotated].numpy(), **style)
        axes.set(xscale="log", yscale="log")
        axes.axvline(panel.context, color="0.25", linewidth=1, linestyle="--")
        plain_axes(axes)
    decades = [10.0**i for i in range(10) if min(finite, default=1.0) / 2 <= 10.0**i <= longest]
    ticks = {length: EngFormatter(sep="")(length) for length in decades}
    if most:
        # The geometric mean is the middle of a stretch of a logarithmic axis.
        ticks[math.sqrt(places[0] * places[-1])] = "unrotated"
    for axes in grid:
        axes.set_xticks(list(ticks), list(ticks.values()))
        axes.minorticks_off()
    low, high = grid[0].get_ylim()
    if high / low < 1.5:  # a logarithmic scale would have one number there
        for axes in grid:
            axes.set_yscale("linear")
    else:
        grid[0].yaxis.set_minor_locator(LogLocator(subs=range(1, 10)))
        grid[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        grid[0].yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
    figure.supxlabel("wavelength of the pair [tokens], log scale", fontsize=10)
    figure.supylabel("rms error of the logit", fontsize=10)
    lines["one turn in the context"] = Line2D([], [], color="0.25", linewidth=1, linestyle="--")
    shared_legend(figure, lines)
    return figure
