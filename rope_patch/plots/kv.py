"""Figures of quantized caches: arrays in, matplotlib Figure out. Needs matplotlib.

A scheme has one colour in all figures that are given the same schemes in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox
from torch import Tensor

from rope_patch.plots.analysis import BOUND, waved
from rope_patch.plots.base import line_styles, new_panels, wrapped
from rope_patch.plots.theory import shared_legend, without_spines

BITS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
MARKERS = {"safe": "o", "undecided": "^", "unsafe": "X", "": "s"}
"""Of a verdict; full precision has none."""
LINEAR = 1.0
"""A change of perplexity that is drawn in proportion; larger ones by their logarithm [%]."""
PLACES = ((6, 4), (6, -10), (-6, 4), (-6, -10), (0, 9), (0, -15), (10, 14), (10, -20), (-10, 14), (-10, -20), (12, 24))
"""Where a label may stand beside its point, the best first [points]."""
STEP = 1.25
"""Distance between unrotated pairs, which have no wavelength, on the axis of wavelengths."""
FAR = 6
"""Of those, the first that needs a line to its point."""


class Spot(NamedTuple):
    """A scheme among others.

    Attributes:
        label: beside it; none if empty.
        bits: per element of the cache.
        value: what it costs.
        low: lower end of its interval; not finite where there is none.
        high: upper end.
        verdict: ``"safe"``, ``"undecided"``, ``"unsafe"``; empty for full precision.
        scheme: whose colour it has: its own, or the one it was tried for.
        mitigation: drawn hollow.
    """

    label: str
    bits: float
    value: float
    low: float
    high: float
    verdict: str
    scheme: str
    mitigation: bool = False


def tradeoff(
    panels: Mapping[str, Sequence[Spot]],
    schemes: Sequence[str],
    *,
    title: str,
    ylabel: str,
    lower: bool,
    limit: float | None = None,
) -> Figure:
    """Draw what schemes cost against the bits of the cache, a panel per method, the front as steps.

    Args:
        panels: method to its schemes.
        schemes: in the order of their colours.
        title: of the figure.
        ylabel: of the cost, with its unit.
        lower: whether less is better; the scale is then linear within ±:data:`LINEAR` and logarithmic beyond.
        limit: what is tolerated, drawn as a line.
    """
    figure, grid = new_panels(list(panels), title, width=4.6, height=3.4)
    colors = _colors(schemes)
    for axes, spots in zip(grid, panels.values(), strict=True):
        known = [spot for spot in spots if math.isfinite(spot.value)]
        edge = front([(spot.bits, spot.value if lower else -spot.value) for spot in known])
        steps = [known[i] for i in edge]
        if steps:
            axes.step([s.bits for s in steps], [s.value for s in steps], where="post", color="0.75", linewidth=1.2)
        axes.axhline(0, color="0.6", linewidth=0.8)
        if limit is not None:
            axes.axhline(limit, color="0.4", linewidth=1, linestyle=":")
            axes.annotate("tolerated", (1, limit), (-2, 2), xycoords=("axes fraction", "data"), ha="right", fontsize=7,
                          textcoords="offset points", color="0.4")  # fmt: skip
        for spot in known:
            color = colors.get(spot.scheme, "black")
            if -math.inf < spot.low < spot.high < math.inf and not spot.mitigation:
                axes.plot([spot.bits] * 2, [spot.low, spot.high], color=color, linewidth=1.2, alpha=0.6)
            face = "white" if spot.mitigation else color
            axes.plot(spot.bits, spot.value, marker=MARKERS[spot.verdict], markersize=6, linestyle="", color=color,
                      markerfacecolor=face, zorder=2.5 if spot.mitigation else 3)  # fmt: skip
        if lower:
            axes.set_yscale("symlog", linthresh=LINEAR)
            axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(_signed))
        axes.set_xscale("log", base=2)
        axes.margins(0.14)
        without_spines(axes)
    lowest, highest = grid[0].get_xlim()
    for axes in grid:
        axes.minorticks_off()
        axes.set_xticks(
            [bits for bits in BITS if lowest <= bits <= highest],
            [str(bits) for bits in BITS if lowest <= bits <= highest],
        )
    figure.supxlabel("bits per element of the cache, log scale", fontsize=10)
    figure.supylabel(ylabel, fontsize=10)
    shapes = {spot.verdict: spot for spots in panels.values() for spot in spots}
    shown: dict[str, Any] = {name: _dot(colors[name], "o") for name in schemes}
    shown |= {verdict or "full precision": _dot("0.35", sign) for verdict, sign in MARKERS.items() if verdict in shapes}
    if any(spot.mitigation for spots in panels.values() for spot in spots):
        shown["hollow: a mitigation"] = _dot("0.35", "o", hollow=True)
    shared_legend(figure, shown)
    figure.draw_without_rendering()
    for axes, spots in zip(grid, panels.values(), strict=True):
        _label(figure, axes, [spot for spot in spots if math.isfinite(spot.value)], colors)
    return figure


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the points that no other beats in both bits and cost, fewest bits first.

    >>> front([(16, 0), (4, 9), (5, 2), (5, 1), (8, 3)])
    [1, 3, 0]
    """
    best: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: points[i]):
        if not best or points[i][1] < points[best[-1]][1]:
            best.append(i)
    return best


class Waves(NamedTuple):
    """A panel of errors by wavelength.

    Attributes:
        wavelength: (pairs,) of the pairs; inf for unrotated ones [tokens].
        errors: scheme to its errors (pairs,).
        context: where the frequency bound is drawn [tokens].
    """

    wavelength: Tensor
    errors: Mapping[str, Tensor]
    context: int


def errors_by_wavelength(panels: Mapping[str, Waves], schemes: Sequence[str], *, title: str) -> Figure:
    """Draw what each pair adds to the error of the logits against its wavelength, a line per scheme.

    Unrotated pairs stand at the right edge.

    Args:
        panels: method, or method and kind of layers, to its errors.
        schemes: in the order of their colours.
        title: of the figure.
    """
    figure, grid = new_panels(list(panels), title, width=4.6, height=2.3)
    finite = [float(length) for panel in panels.values() for length in panel.wavelength.tolist() if length < math.inf]
    longest = max([*finite, *(panel.context for panel in panels.values())])
    most = max(int(panel.wavelength.isinf().sum()) for panel in panels.values())
    rest = [3 * longest * STEP**i for i in range(most)]  # a logarithm has no end: they stand beyond the longest
    styles, lines = dict(zip(schemes, line_styles(len(schemes)), strict=True)), dict[str, Any]()
    for axes, panel in zip(grid, panels.values(), strict=True):
        rests = panel.wavelength.isinf()
        if rests.any():
            axes.axvspan(rest[0] / STEP, rest[-1] * STEP, color="0.95", zorder=0)
        for name, values in panel.errors.items():
            drawn = values.double().masked_fill(values <= 0, math.nan)  # nor a 0
            style = {**styles[name], "linewidth": 1.3, "marker": ".", "markersize": 4}
            lines[name] = axes.plot(panel.wavelength[~rests].numpy(), drawn[~rests].numpy(), **style)[0]
            axes.plot(rest[: int(rests.sum())], drawn[rests].numpy(), **style)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.axvline(panel.context, color="0.25", linewidth=1, linestyle="--")
        axes.annotate(BOUND, (panel.context, 1), (-2, -1), xycoords=("data", "axes fraction"), fontsize=7, ha="right",
                      textcoords="offset points", va="top", color="0.25")  # fmt: skip
        without_spines(axes)
    decades = [10.0**i for i in range(0, 10) if min(finite, default=1.0) / 2 <= 10.0**i <= longest]
    ticks = {length: waved(length) for length in decades} | (
        {math.sqrt(rest[0] * rest[-1]): "unrotated"} if most else {}
    )
    for axes in grid:
        axes.set_xticks(list(ticks), list(ticks.values()))
        axes.minorticks_off()
        _label_decades(axes)
    figure.supxlabel("wavelength of the pair [tokens], log scale", fontsize=10)
    figure.supylabel("rms error of the logit", fontsize=10)
    shared_legend(figure, lines)
    return figure


def errors_by_layer(
    panels: Mapping[str, Mapping[str, tuple[Sequence[int], Sequence[float]]]], schemes: Sequence[str], *, title: str
) -> Figure:
    """Draw the error of each layer's attention, a line per scheme, a panel per method.

    Args:
        panels: method to scheme to layers and errors [%].
        schemes: in the order of their colours.
        title: of the figure.
    """
    figure, grid = new_panels(list(panels), title, width=4.6, height=2.3)
    styles, lines = dict(zip(schemes, line_styles(len(schemes)), strict=True)), dict[str, Any]()
    for axes, curves in zip(grid, panels.values(), strict=True):
        for name, (layers, values) in curves.items():
            positive = [(layer, value) for layer, value in zip(layers, values, strict=True) if value > 0]
            style = {**styles[name], "linewidth": 1.3, "marker": ".", "markersize": 5}
            lines[name] = axes.plot([layer for layer, _ in positive], [value for _, value in positive], **style)[0]
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(8, integer=True))
        without_spines(axes)
    for axes in grid:
        axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(matplotlib.ticker.LogFormatter(minor_thresholds=(1.5, 0.5)))
        axes.tick_params(labelsize=8, which="both")
    figure.supxlabel("layer", fontsize=10)
    figure.supylabel("error of the output [%], log scale", fontsize=10)
    shared_legend(figure, lines)
    return figure


def outlier_shares(panels: Mapping[str, Mapping[str, tuple[Tensor, Tensor]]], *, title: str) -> Figure:
    """Draw what lies in outlier pairs against what goes when they are kept, a point per head, a panel per scheme.

    Args:
        panels: scheme to method to direct and induced shares: (heads,) each; nan where a head has none.
        title: of the figure.
    """
    figure, grid = new_panels(list(panels), title, width=2.5, height=2.2)
    methods = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    styles = dict(zip(methods, line_styles(len(methods)), strict=True))
    signs = ("o", "^", "s", "D")
    lines: dict[str, Any] = {}
    for axes, parts in zip(grid, panels.values(), strict=True):
        axes.plot([0, 1], [0, 1], color="0.75", linewidth=1)
        for i, (name, (direct, induced)) in enumerate(parts.items()):
            style = {"marker": signs[i % len(signs)], "color": styles[name]["color"], "linestyle": "", "alpha": 0.65}
            lines[name] = axes.plot(direct.numpy(), induced.numpy(), markersize=4, **style)[0]
        axes.set(xlim=(-0.1, 1.1), ylim=(-0.1, 1.1), aspect="equal")
        axes.set_xticks([0, 0.5, 1], ["0", "50", "100"])
        axes.set_yticks([0, 0.5, 1], ["0", "50", "100"])
        without_spines(axes)
    figure.supxlabel("error that lies in outlier pairs [%]", fontsize=10)
    figure.supylabel("error that goes when\nthey are kept [%]", fontsize=10)
    shared_legend(figure, lines)
    return figure


# --- small parts -----------------------------------------------------------------------------------------------------


def _label_decades(axes: Axes) -> None:
    """Put numbers between the decades of a logarithmic y axis that shows fewer than two of them."""
    low, high = axes.get_ylim()
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for steps in ((1,), (1, 3), (1, 2, 5), range(1, 10)):
        ticks = [step * 10.0**i for i in range(first, last + 1) for step in steps if low <= step * 10.0**i <= high]
        if len(ticks) >= 2:
            break
    else:
        ticks = [tick for tick in matplotlib.ticker.MaxNLocator(4).tick_values(low, high) if low <= tick <= high]
    if steps != (1,):
        axes.set_yticks(ticks, [f"{tick:.4g}" for tick in ticks])


def _colors(schemes: Sequence[str]) -> dict[str, str]:
    return {name: style["color"] for name, style in zip(schemes, line_styles(len(schemes)), strict=True)}


def _dot(color: str, sign: str, *, hollow: bool = False) -> Line2D:
    face = "white" if hollow else color
    return Line2D([], [], color=color, marker=sign, linestyle="", markersize=6, markerfacecolor=face)


def _signed(value: float, _: Any) -> str:
    return f"{value:+g}".replace("-", "\N{MINUS SIGN}") if value else "0"


def _label(figure: Figure, axes: Axes, spots: Sequence[Spot], colors: Mapping[str, str]) -> None:
    """Name points so that no name hides another, or a point, where there is room."""
    renderer: Any = figure._get_renderer()  # type: ignore[attr-defined]
    frame, around = axes.get_window_extent(renderer), 3 * figure.dpi / 72
    points = [axes.transData.transform((spot.bits, spot.value)) for spot in spots]
    taken = [Bbox.from_extents(x - around, y - around, x + around, y + around) for x, y in points]

    def write(spot: Spot, place: int, **line: Any) -> Any:
        across, up = PLACES[place]
        side = "left" if across > 0 else "right" if across < 0 else "center"
        name, at = wrapped(spot.label, 22), (spot.bits, spot.value)
        style = {"fontsize": 7, "color": colors[spot.scheme] if spot.mitigation else "black", **line}
        style["path_effects"] = [patheffects.withStroke(linewidth=2, foreground="white")]
        return axes.annotate(name, at, (across, up), textcoords="offset points", ha=side, **style)

    for spot in spots:
        if not spot.label:
            continue
        placements = []
        for place in range(len(PLACES)):
            text = write(spot, place)
            box = text.get_window_extent(renderer)
            text.remove()
            outside = max(0.0, frame.x0 - box.x0) + max(0.0, box.x1 - frame.x1)
            outside += max(0.0, frame.y0 - box.y0) + max(0.0, box.y1 - frame.y1)
            placements.append((100 * outside + 3 * sum(_shared(box, other) for other in taken) + 4 * place, place, box))
        _, place, box = min(placements, key=lambda item: item[:2])
        far = place >= FAR
        write(spot, place, **({"arrowprops": {"arrowstyle": "-", "color": "0.7", "linewidth": 0.6}} if far else {}))
        taken.append(box)


def _shared(box: Bbox, other: Bbox) -> float:
    """Area that two boxes share."""
    across = min(box.x1, other.x1) - max(box.x0, other.x0)
    up = min(box.y1, other.y1) - max(box.y0, other.y0)
    return float(max(0.0, across) * max(0.0, up))
