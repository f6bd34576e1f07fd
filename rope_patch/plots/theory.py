"""Figures of the theory of a table: arrays in, matplotlib Figure out. Needs matplotlib, as ``plots`` does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from rope_patch.plots.base import add_legend, line_styles, new_figure, new_panels, wrapped

Curves = Mapping[str, tuple[Tensor, Tensor]]
"""Name to positions or distances [tokens] and values, of equal length."""


def decay(panels: Mapping[str, Curves], *, title: str, ylabel: str) -> Figure:
    """Draw activations against distance, a panel per kind of query and key, a line per table.

    Args:
        panels: name of the panel to name of the table to its curve.
        title: of the figure.
        ylabel: of the values.
    """
    figure, grid = new_panels(list(panels), title, width=4.2, height=1.9)
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    styles = dict(zip(names, line_styles(len(names)), strict=True))
    lines: dict[str, Any] = {}
    for axes, curves in zip(grid, panels.values(), strict=True):
        for name, (distances, values) in curves.items():
            lines[name] = axes.plot(distances, values, **{**styles[name], "linewidth": 1.1})[0]
        axes.axhline(0, color="0.4", linewidth=0.8, linestyle=":")
        axes.set_xscale("log")
        without_spines(axes)
    figure.supxlabel("distance [tokens], log scale", fontsize=10)
    figure.supylabel(ylabel, fontsize=10)
    shared_legend(figure, lines)
    return figure


def image_distances(curves: Curves, *, neighbours: Mapping[str, float], title: str) -> Figure:
    """Draw the distance of two images against that of their positions; a dotted line is that of neighbours.

    Args:
        curves: table to distances of positions [tokens] and of images (0 to 2).
        neighbours: table to the distance of consecutive images.
        title: of the figure.
    """
    figure, axes = new_figure(title)
    for (name, (apart, values)), style in zip(curves.items(), line_styles(len(curves)), strict=True):
        axes.plot(apart, values, label=wrapped(name, 30), **{**style, "linewidth": 1.1})
        axes.axhline(neighbours[name], color=style["color"], linewidth=1, linestyle=":")
    axes.set(xscale="log", ylim=(0, None), xlabel="positions apart [tokens], log scale")
    axes.set_ylabel("distance of the images of a unit vector")
    add_legend(axes, "table")
    return figure


def nearest_images(curves: Curves, *, trained_length: int, title: str) -> Figure:
    """Draw how far the image at each position is from the nearest image within the trained context.

    Args:
        curves: table to new positions [tokens] and distances (0 to 2).
        trained_length: drawn as a line [tokens].
        title: of the figure.
    """
    figure, axes = new_figure(title)
    for (name, (positions, values)), style in zip(curves.items(), line_styles(len(curves)), strict=True):
        label = f"{wrapped(name, 30)}  ({float(values.max()):.3f})"
        axes.plot(positions, values, label=label, **{**style, "linewidth": 1.1})
    _mark(axes, trained_length, "trained length")
    axes.set(xlabel="position [tokens]", ylabel="distance to the nearest trained image", ylim=(0, None))
    axes.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:.0f}"))
    add_legend(axes, "table (farthest)")
    return figure


def head_masses(curves: Curves, *, title: str, ylabel: str, legend: str) -> Figure:
    """Draw attention on one token against the query's position.

    Args:
        curves: name to positions [tokens] and coefficients (0 to 1), in an order that colours show; the last one, in
            grey, is what the others are to be compared with.
        title: of the figure.
        ylabel: of the coefficients.
        legend: what distinguishes the curves.
    """
    figure, axes = new_figure(title)
    colors = matplotlib.colormaps["viridis"]
    for i, (name, (positions, values)) in enumerate(curves.items()):
        last = i == len(curves) - 1
        color, line = ("0.5", "--") if last else (colors(0.85 * i / max(1, len(curves) - 2)), "-")
        axes.plot(positions, values, color=color, linestyle=line, linewidth=1.6, label=wrapped(name, 30))
    axes.set(xscale="log", xlabel="position of the query [tokens], log scale", ylabel=ylabel, ylim=(-0.03, 1.03))
    add_legend(axes, legend)
    return figure


def content_head(panels: Mapping[str, Curves], *, marked: int, title: str, ylabel: str) -> Figure:
    """Draw the activation of a few keys against distance, a panel per table.

    Args:
        panels: table to name of the key to distances [tokens] and activations.
        marked: distance drawn as a line [tokens].
        title: of the figure.
        ylabel: of the activations.
    """
    figure, grid = new_panels(list(panels), title, width=4.2, height=2.4)
    lines: dict[str, Any] = {}
    for axes, curves in zip(grid, panels.values(), strict=True):
        for (name, (distances, values)), style in zip(curves.items(), line_styles(len(curves)), strict=True):
            lines[name] = axes.plot(distances, values, **style)[0]
        axes.axhline(0, color="0.4", linewidth=0.8, linestyle=":")
        axes.axvline(marked, color="0.4", linewidth=1, linestyle=":")
        without_spines(axes)
    figure.supxlabel("distance [tokens]", fontsize=10)
    figure.supylabel(ylabel, fontsize=10)
    shared_legend(figure, lines)
    return figure


def helices(panels: Mapping[str, Tensor], *, trained: Tensor, title: str) -> Figure:
    """Draw images in three dimensions: the curve known from training, and on or off it the images in use.

    Args:
        panels: method to points (positions, 3), of coordinates from -1 to 1.
        trained: points (times, 3) of the curve of training, in every panel.
        title: of the figure.
    """
    across = min(4, len(panels))
    down = math.ceil(len(panels) / across)
    figure = Figure(figsize=(2.4 * across + 1.8, 2.2 * down + 0.4), layout="constrained")
    colors = matplotlib.colormaps["viridis"]
    lines: dict[str, Any] = {}
    for i, (name, points) in enumerate(panels.items()):
        axes: Any = figure.add_subplot(down, across, i + 1, projection="3d")
        lines["curve of training"] = axes.plot(*trained.T.numpy(), color=colors(0.05), linewidth=1.6)[0]
        dots = {"marker": ".", "markersize": 3, "linestyle": "", "color": colors(0.65)}
        lines["images in use"] = axes.plot(*points.T.numpy(), **dots)[0]
        axes.set_title(wrapped(name, 26), fontsize=9)
        axes.set(xlim=(-1, 1), ylim=(-1, 1), zlim=(-1, 1))
        axes.set_box_aspect((1, 1, 1), zoom=1.0)
        for axis, label in ((axes.xaxis, "cos t"), (axes.yaxis, "sin t"), (axes.zaxis, "sin at")):
            axis.set_ticks([-1, 0, 1], [""] * 3)
            axis.set_label_text(label, fontsize=8)
            axis.labelpad = -12
        axes.view_init(elev=18, azim=-60)
    shared_legend(figure, lines)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def without_spines(axes: Axes) -> None:
    """Leave out the lines above and to the right, and draw a light grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, which="major", color="0.92")
    axes.set_axisbelow(True)


def _mark(axes: Axes, at: float, label: str) -> None:
    axes.axvline(at, color="0.4", linewidth=1, linestyle=":")
    axes.annotate(f" {label}", (at, 1), xycoords=("data", "axes fraction"), va="top", color="0.4", fontsize=9)


def shared_legend(figure: Figure, lines: Mapping[str, Any]) -> None:
    """One legend beside all panels."""
    names = [wrapped(name, 24) for name in lines]
    figure.legend(list(lines.values()), names, loc="outside right center", frameon=False, fontsize=9)
