"""Figures from arrays; nothing here touches a model. Needs matplotlib (``pip install "rope_patch[plots]"``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from rope_patch.frequencies import still, wavelength


def perplexity_by_position(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, trained_length: int, title: str
) -> Figure:
    """Draw perplexity against position, a line per method, best at the end first in the legend.

    Args:
        curves: method to positions [tokens] and perplexities, of equal length.
        trained_length: the context the model was trained at, drawn as a line [tokens].
        title: of the figure.
    """
    figure, axes = _figure(title)
    ranked = sorted(curves, key=lambda name: curves[name][1][-1])
    for name, style in zip(ranked, _styles(len(ranked)), strict=True):
        positions, values = curves[name]
        axes.plot(positions, values, label=f"{name}  ({values[-1]:.3g})", **style)
    axes.axvline(trained_length, color="0.4", linewidth=1, linestyle=":")
    axes.annotate(
        " trained length", (trained_length, 1), xycoords=("data", "axes fraction"), va="top", color="0.4", fontsize=9
    )
    axes.set(xlabel="position [tokens]", ylabel="perplexity (log scale)", yscale="log")
    axes.yaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
    axes.yaxis.set_minor_formatter(matplotlib.ticker.LogFormatter(minor_thresholds=(2, 0.5)))
    _legend(axes, "method (at the end)")
    return figure


def wavelengths(tables: Mapping[str, Tensor], *, context: int, title: str) -> Figure:
    """Draw the wavelength of every pair, a line per table; still pairs sit on a line at the top.

    Args:
        tables: name to inv_freq: (pairs,) [rad/token].
        context: length at which a pair makes one full turn, drawn as a line [tokens].
        title: of the figure.
    """
    figure, axes = _figure(title)
    lengths = {name: wavelength(table.double()) for name, table in tables.items()}
    resting = {name: still(table) for name, table in tables.items()}
    top = 2 * max(float(w[~resting[name]].max()) for name, w in lengths.items() if not bool(resting[name].all()))
    shown = 0
    for name, style in zip(tables, _styles(len(tables)), strict=True):
        turns = ~resting[name]
        (line,) = axes.plot(
            turns.nonzero().flatten(), lengths[name][turns], marker="o", markersize=3, label=name, **style
        )
        if bool(resting[name].any()):  # a row of its own for each table, above all wavelengths
            shown += 1
            rest = resting[name].nonzero().flatten()
            axes.plot(
                rest, [top * 1.8**shown] * len(rest), marker="^", markersize=5, linestyle="", color=line.get_color()
            )
    if shown:
        axes.axhspan(top, top * 1.8 ** (shown + 1), color="0.96", zorder=0)
        axes.annotate(" still (infinite)", (0, top * 1.8), xycoords=("axes fraction", "data"), fontsize=9)
    axes.axhline(context, color="0.4", linewidth=1, linestyle=":")
    label = f" {context} tokens: one turn"
    axes.annotate(label, (0, context), xycoords=("axes fraction", "data"), va="bottom", fontsize=9)
    axes.set(xlabel="pair (fast to slow)", ylabel="wavelength [tokens]", yscale="log")
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    _legend(axes, "table")
    return figure


def _figure(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, which="major", color="0.92")
    axes.set_axisbelow(True)
    return figure, axes


def _styles(count: int) -> list[dict[str, Any]]:
    """Distinct lines: colours of a colour-blind-safe map, then the same ones dashed."""
    colors = matplotlib.colormaps["tab10"].colors  # type: ignore[attr-defined]
    return [
        {"color": colors[i % 10], "linestyle": ("-", "--", ":")[i // 10 % 3], "linewidth": 1.6} for i in range(count)
    ]


def _legend(axes: Axes, title: str) -> None:
    axes.legend(title=title, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9, alignment="left")
