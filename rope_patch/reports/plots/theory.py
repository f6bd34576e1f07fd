"""The figure of the theory of a table: arrays in, matplotlib Figure out. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from rope_patch.reports.plots.base import Curves, line_styles, new_panels, plain, shared_legend


def curves(panels: Mapping[str, Curves], *, title: str, xlabel: str, ylabel: str, log: bool = True) -> Figure:
    """Draw values against distance or position, a line per name, panels side by side on one scale.

    Args:
        panels: name of the panel to its curves; a name has one colour in all panels.
        title: title of the figure.
        xlabel: what the positions or distances are.
        ylabel: what the values are.
        log: whether positions are on a logarithmic scale.
    """
    figure, grid = new_panels(list(panels), title, width=3.0, height=2.6)
    styles = line_styles(dict.fromkeys(name for parts in panels.values() for name in parts))
    lines: dict[str, Any] = {}
    for axes, parts in zip(grid, panels.values(), strict=True):
        for name, (places, values) in parts.items():
            lines[name] = axes.plot(places, values, **styles[name])[0]
        axes.axhline(0, color="0.4", linewidth=0.8, linestyle=":")
        axes.set_xscale("log" if log else "linear")
        plain(axes)
    figure.supxlabel(f"{xlabel} [tokens]" + (", log scale" if log else ""), fontsize=10)
    figure.supylabel(ylabel, fontsize=10)
    shared_legend(figure, lines)
    return figure
