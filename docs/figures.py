"""Draw the figures of the README, of docs/results/tables.md and of docs/results/caches.md from benchmarks/results.

python docs/figures.py        # writes a PNG into docs for each function that main() names
"""

from __future__ import annotations

import json
import math
import operator
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from rope_patch import frequencies
from rope_patch.evaluation.intervals import paired_means
from rope_patch.runtime.plots import (
    COLORS,
    few_log_ticks,
    line_styles,
    mark_position,
    new_figure,
    perplexity_by_position,
    plain_axes,
    wrapped_name,
)

ROOT = Path(__file__).resolve().parents[1]
LLAMA, GEMMA = "SmolLM2-135M: all layers", "Gemma 3 270M: its full layers"
QWEN = "Qwen2.5-Coder 0.5B: all layers"
NAMES = {"smollm2": "SmolLM2-135M", "gemma3": "Gemma 3 270M"}
LONGEST_DECODING = 512
"""Number of tokens that models write in the runs of the figure of decoding."""
CONTEXTS = {"smollm2": 8192, "gemma3": 32768}
PAIRS = {"smollm2": (1e5, 32), "gemma3": (1e6, 128), "qwen": (1e6, 32)}
"""Base and number of pairs of the table that p-RoPE changes."""
TABLES = {
    "default": ("default", "default"),
    "yarn ×2": ("yarn", "yarn:factor=2"),
    "abf ×4": ("abf", "abf:factor=4"),
    "p_rope .75": ("p_rope-0.75", "p_rope:p=0.75"),
}
"""Label to the names of a table in the results of SmolLM2 and in those of both models."""


def result(name: str) -> Any:
    """Return a file of benchmarks/results."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def smollm2(table: str) -> dict[str, float]:
    """Return the perplexity of SmolLM2 by range of positions of windows of 16384 tokens of novels, untrained."""
    measured = {"table": table, "text": "novels", "state": "zero", "length": 16384}
    (row,) = [row for row in result("study_smollm2")["text"] if measured.items() <= row.items()]
    perplexity: dict[str, float] = row["perplexity"]
    return perplexity


def losses(**cell: Any) -> dict[str, list[float]]:
    """Return the losses of the windows of a cell of the study of both models, by range of positions [nats/token]."""
    wanted = {"kind": "text", "where": "", "adapted": False} | cell
    rows = [row for row in result("study_families")["cells"] if wanted.items() <= row.items()]
    spans = rows[0]["nll"] if rows else ()
    return {span: [loss for row in rows for loss in row["nll"][span]] for span in spans}


def steps(perplexity: Mapping[str, float]) -> tuple[list[int], list[float]]:
    """Return positions and perplexities with both ends of each range of positions."""
    positions = [int(end) for span in perplexity for end in span.split("-")]
    return positions, [value for value in perplexity.values() for _ in range(2)]


def before_after() -> Figure:
    """Draw SmolLM2 before and after YaRN."""
    lines = {"default": "default (before)", "yarn": "yarn (after, no training)"}
    figure = perplexity_by_position(
        {name: steps(smollm2(table)) for table, name in lines.items()},
        trained_length=CONTEXTS["smollm2"],
        title="SmolLM2-135M reads twice its context after a patch",
    )
    figure.set_size_inches(8.5, 3.3)
    return figure


def two_models() -> Figure:
    """Draw both models under several tables, a panel each."""
    figure = new_figure("Perplexity by position in novels, no training", 3.8)
    styles = line_styles(TABLES)
    for axes, model in zip(figure.subplots(1, 2), CONTEXTS, strict=True):
        for label, (old, table) in TABLES.items():
            if model == "smollm2":
                perplexity = smollm2(old)
            else:
                means = losses(model=model, length=65536, table=table)
                perplexity = {span: math.exp(statistics.fmean(each)) for span, each in means.items()}
            axes.plot(*steps(perplexity), label=label, **styles[label])
        axes.set_title(NAMES[model], fontsize=10, loc="left")
        axes.set(xlabel="position [tokens]", ylabel="perplexity (log scale)", yscale="log")
        mark_position(axes, CONTEXTS[model], "trained length")
        few_log_ticks(axes.yaxis)
        plain_axes(axes)
    axes.legend(frameon=False, fontsize=9)
    return figure


def changes(table: str, **cell: Any) -> list[float]:
    """Return the change of the loss of each window of a cell from the unchanged table, if measured [nats/token]."""

    def means(name: str) -> list[float]:
        found = losses(table=name, **cell)
        sizes = [int(end) - int(start) for start, end in (span.split("-") for span in found)]
        windows = zip(*found.values(), strict=True)
        return [sum(map(operator.mul, sizes, window)) / sum(sizes) for window in windows]

    patched = means(table)
    return [ours - theirs for ours, theirs in zip(patched, means("default"), strict=bool(patched))]


ATTENTION_FACTORS = {
    "1.07, as published": "yarn:factor=2",
    "1.03": "yarn:factor=2:mscale=1.5:mscale_all_dim=1",
    "1": "yarn:factor=2:attention_factor=1",
}
"""YaRN at twice the context by its attention factor."""
WITHIN = (
    ("SmolLM2-135M, novels", {"model": "smollm2", "length": 8192}),
    ("Gemma 3 270M, novels", {"model": "gemma3", "length": 8192}),
    ("Qwen2.5-Coder 0.5B, novels", {"model": "qwen", "length": 8192}),
    ("Qwen2.5-Coder 0.5B, code", {"model": "qwen", "length": 8192, "kind": "code"}),
    ("Qwen2.5-Coder 1.5B, novels", {"model": "qwen-1.5b", "length": 4096}),
)
"""Windows within the trained context on which YaRN was measured."""


def attention_factor() -> Figure:
    """Draw what YaRN costs within the trained context, by its attention factor, a row for each model and text."""
    figure = new_figure("What YaRN for twice the context costs within the trained one, by its attention factor", 2.8)
    axes = figure.subplots()
    styles = line_styles(ATTENTION_FACTORS)
    for row, (_, cell) in enumerate(WITHIN):
        for shift, (label, table) in zip((-0.2, 0, 0.2), ATTENTION_FACTORS.items(), strict=True):
            found = changes(table, **cell)
            if not found:  # not measured yet
                continue
            estimate = statistics.fmean(found)
            low, high = paired_means(found, [0.0] * len(found), 0.95)
            low, estimate, high = (100 * math.expm1(value) for value in (low, estimate, high))
            style = styles[label] | {"linestyle": "none", "marker": "o"}
            axes.plot([estimate], [row + shift], label=label if row == 0 else None, **style)
            axes.plot([low, high], [row + shift] * 2, color=style["color"], linewidth=1)
    axes.axvline(0, color="#888888", linewidth=0.8)
    axes.set(yticks=range(len(WITHIN)), yticklabels=[name for name, _ in WITHIN], ylim=(len(WITHIN) - 0.5, -0.5))
    axes.set_xlabel("change of perplexity [%], and its 95 % interval over three windows")
    signed_percent(axes.xaxis)
    plain_axes(axes)
    axes.legend(frameon=False, fontsize=9, title="attention factor", title_fontsize=9)
    return figure


def signed_percent(axis: Any) -> None:
    """Write changes with their sign, a true minus, on an axis."""
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:+g}".replace("-", "\N{MINUS SIGN}") if x else "0"))


def angle(model: str, p: float, position: float) -> float:
    """Return how far the fastest pair that p-RoPE stops would have turned at a position [rad]."""
    base, pairs = PAIRS[model]
    return position * float(frequencies.geometric(base, 2 * pairs)[math.floor(p * pairs)])


def prices(model: str, where: str, values: Sequence[float]) -> Iterator[tuple[float, list[float], list[float]]]:
    """Yield each p with the angles of the ranges of positions and the rises of perplexity there [%]."""
    plain = losses(model=model, length=8192, table="default")
    for p in values:
        patched = losses(model=model, length=8192, table=f"p_rope:p={p:g}", where=where)
        middles = [statistics.fmean(map(int, span.split("-"))) for span in plain]
        rises = [
            100 * math.expm1(statistics.fmean(a - b for a, b in zip(patched[span], plain[span], strict=True)))
            for span in plain
        ]
        yield p, [angle(model, p, middle) for middle in middles], rises


def angles() -> Figure:
    """Draw what p-RoPE costs against the angle of the fastest pair that it stops."""
    figure = new_figure("What p-RoPE costs untrained, at equal angle", 4.2)
    axes = figure.subplots()
    for color, label, model, where, values in (
        (COLORS[1], LLAMA, "smollm2", "all", (0.9, 0.75, 0.5)),
        (COLORS[4], "SmolLM2-135M: every sixth layer", "smollm2", "every sixth", (0.9, 0.75, 0.5)),
        (COLORS[0], GEMMA, "gemma3", "", (0.9, 0.75, 0.625, 0.5)),
        (COLORS[2], QWEN, "qwen", "", (0.9, 0.75, 0.625, 0.5)),
    ):
        for i, (p, turned, rises) in enumerate(prices(model, where, values)):
            axes.plot(turned, rises, marker="o", markersize=4, color=color, label=label if i == 0 else None)
            if abs(rises[-1]) > 1:  # names of the others would lie on each other
                axes.annotate(f"  p = {p:g}", (turned[-1], rises[-1]), color=color, fontsize=8, va="bottom")
    mark_position(axes, 0.2, "0.2 rad: below, at most +1 %")
    axes.set(xscale="log", xlabel="angle of the fastest stopped pair [rad], log scale")
    axes.set_yscale("symlog", linthresh=1)
    axes.set(ylabel="rise of perplexity [%], log scale above 1", ylim=(-4, 1000), xlim=(None, 40))
    few_log_ticks(axes.xaxis)
    signed_percent(axes.yaxis)
    plain_axes(axes)
    axes.legend(frameon=False, fontsize=9)
    return figure


def decoding() -> Figure:
    """Draw what formats of the cache cost by step while models write, in the longest run of each."""
    runs = [run for run in result("kv_decode")["runs"] if run["decode"] == LONGEST_DECODING]
    figure = new_figure(f"What a quantized cache costs while a model writes after {runs[0]['length']} tokens", 5.4)
    styles = line_styles([row["format"] for row in runs[0]["rows"]])
    panels = figure.subplots(2, len(runs), sharey=True, sharex=True)
    kinds = {"forced": "tokens of full precision", "own": "the format's own tokens"}
    for row_of_axes, (kind, title) in zip(panels, kinds.items(), strict=True):
        row_of_axes[0].set(ylabel="KL [nats/token], log scale")
        for axes, run in zip(row_of_axes, runs, strict=True):
            for row in run["rows"]:
                means = row[f"{kind}_by_step"]
                width = run["decode"] / len(means)
                middles = [(i + 0.5) * width for i in range(len(means))]
                axes.plot(middles, means, label=row["format"], **styles[row["format"]])
            axes.set_title(f"{run['model']}\n{title}", fontsize=9, loc="left")
            axes.set(yscale="log")
            plain_axes(axes)
    for axes, run in zip(panels[1], runs, strict=True):
        axes.set(xlabel=f"step, means over 64, {run['windows']} prompts")
    lines = panels[0][0].get_lines()
    names = [wrapped_name(line.get_label(), 24) for line in lines]
    figure.legend(lines, names, loc="outside right center", frameon=False, fontsize=9)
    return figure


def kept_tasks() -> Figure:
    """Draw what two toys find, and how well they predict key tokens, by length and table."""
    cells = {cell["cell"]: cell for cell in result("ruler_study")["cells"]}
    figure = new_figure("What two toys keep beyond their 256 tokens, untrained", 5.6)
    panels = figure.subplots(2, 2, sharex=True, sharey="row")
    for column, toy in zip(panels.T, ("llama", "gemma3"), strict=True):
        for axes, kind, metric in zip(column, ("short tasks", "text"), ("passkey", "key_perplexity"), strict=True):
            rows = cells[f"toy {toy}, {kind}"]["rows"]
            styles = line_styles([row["method"] for row in rows])
            for row in rows:
                scores = row["scores"][metric]
                lengths = [int(span.rpartition("-")[2]) for span in scores]
                values = [score["score"] for score in scores.values()]
                axes.plot(lengths, values, marker="o", markersize=3, label=row["method"], **styles[row["method"]])
            plain_axes(axes)
            mark_position(axes, 256, "trained length")
        column[0].set_title({"llama": "Llama", "gemma3": "of Gemma 3's shape"}[toy], fontsize=10, loc="left")
        column[1].set(xscale="log", xlabel="length of the prompt, or end of the positions [tokens]", yscale="log")
        column[1].set_xticks(lengths, [str(length) for length in lengths])
        column[1].minorticks_off()
    panels[0][0].set(ylabel="share of 102 passkeys", ylim=(-0.03, 1.12))
    panels[1][0].set_ylabel("perplexity of key tokens\n(log scale)")
    few_log_ticks(panels[1][0].yaxis)
    lines = panels[0][0].get_lines()[: len(rows)]
    names = [wrapped_name(str(line.get_label()), 20) for line in lines]
    figure.legend(lines, names, loc="outside right center", frameon=False, fontsize=9)
    return figure


def main() -> None:
    """Draw the figures and write the pictures."""
    for draw in (before_after, two_models, attention_factor, angles, decoding, kept_tasks):
        draw().savefig(ROOT / "docs" / f"{draw.__name__}.png", dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
