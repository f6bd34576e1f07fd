"""Draw the figure of the README: perplexity by position of SmolLM2-135M-Instruct, before and after a patch.

python benchmarks/readme_figure.py        # from benchmarks/results/study_smollm2.json into docs/before_after.png
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
TRAINED = 8192
"""Context that the model was trained at [tokens]."""
LINES = {"default": ("before", "#b3402a"), "yarn": ("after: YaRN's table, no training", "#1f5fa8")}
"""Table in the results to the label and the colour of its line."""


def perplexity(table: str) -> dict[str, float]:
    """Return the perplexity of an untrained table at each range of positions, in windows of 16384 tokens of novels."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "study_smollm2.json").read_text(encoding="utf-8"))["text"]
    wanted = {"table": table, "text": "novels", "state": "zero", "length": 16384}
    (row,) = [row for row in rows if wanted.items() <= row.items()]
    return row["perplexity"]


def main() -> None:
    """Draw both lines, each range of positions as one horizontal step."""
    figure, axes = plt.subplots(figsize=(7.5, 3.3), layout="constrained")
    for table, (label, colour) in LINES.items():
        values = perplexity(table)
        ends = [tuple(map(int, span.split("-"))) for span in values]
        positions = [position for span in ends for position in span]
        heights = [value for value in values.values() for _ in range(2)]
        axes.plot(positions, heights, color=colour, linewidth=2.2)
        last = heights[-1]
        above = table == "default"
        axes.text(ends[-1][1], last * (1.08 if above else 0.9), f"{label} ({last:.0f})", color=colour, ha="right",
                  va="bottom" if above else "top")  # fmt: skip
    axes.axvline(TRAINED, color="0.45", linestyle=":", linewidth=1.2)
    axes.text(TRAINED - 120, 250, "trained context", color="0.35", ha="right")
    axes.set_yscale("log")
    axes.set_ylim(20, 600)
    axes.set_yticks([20, 50, 100, 200, 500], ["20", "50", "100", "200", "500"])
    axes.minorticks_off()
    axes.set_xlim(0, 2 * TRAINED)
    axes.set_xticks([0, 4096, 8192, 12288, 16384])
    axes.set_xlabel("position in the text [tokens]")
    axes.set_ylabel("perplexity (log scale)")
    axes.set_title("SmolLM2-135M reads twice its context after a patch", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "docs" / "before_after.png", dpi=110)


if __name__ == "__main__":
    main()
