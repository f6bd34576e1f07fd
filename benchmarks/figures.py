"""Draws the figures of the studies: arrays in, matplotlib Figure out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from rope_patch.reports.plots.base import COLORS, add_title, few_log_ticks, plain_axes, wrapped_name


def shares_beside_perplexity(
    groups: Mapping[str, Mapping[str, tuple[float, tuple[float, float], Sequence[float]]]],
    *,
    title: str,
    share: str,
    perplexity: str,
) -> Figure:
    """Draw a share with its interval beside perplexity, with a line for each arm and a row of panels for each group.

    Args:
        groups: name of a group to name of an arm to (share, its interval, perplexity of each seed).
        title: the title of the figure.
        share: the label of the share, such as ``passkey exact match at 1024``.
        perplexity: the label of the perplexity, such as ``perplexity at 256 to 1024``.
    """
    sizes = [len(arms) for arms in groups.values()]
    figure = Figure(figsize=(9, 0.9 + 0.36 * sum(sizes)), layout="constrained")
    grid = figure.subplots(len(groups), 2, squeeze=False, sharex="col", height_ratios=sizes)
    for (name, arms), (left, right) in zip(groups.items(), grid, strict=True):
        for i, (value, (low, high), perplexities) in enumerate(arms.values()):
            left.plot([low, high], [i, i], color=COLORS[0], linewidth=2, solid_capstyle="butt")
            left.plot(value, i, marker="o", color=COLORS[0])
            right.plot(perplexities, [i] * len(perplexities), marker="o", linestyle="", color=COLORS[1], alpha=0.6)
        left.set_yticks(range(len(arms)), [wrapped_name(arm, 24) for arm in arms])
        right.set_yticks(range(len(arms)), [""] * len(arms))
        left.set_title(name, loc="left", fontsize=10)
        for axes in (left, right):
            axes.set_ylim(len(arms) - 0.5, -0.5)
            plain_axes(axes)
    grid[-1][0].set(xlabel=share, xlim=(-0.03, 1.03))
    grid[-1][1].set(xlabel=f"{perplexity} (log scale), a point per seed", xscale="log")
    few_log_ticks(grid[-1][1].xaxis)
    add_title(figure, title)
    return figure
