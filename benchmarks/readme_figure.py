"""Draw the figure of the README: perplexity by position of SmolLM2-135M-Instruct, before and after a patch.

python benchmarks/readme_figure.py        # from benchmarks/results/study_smollm2.json into docs/before_after.png
"""

from __future__ import annotations

import json
from pathlib import Path

from rope_patch.reports.plots.base import perplexity_by_position

ROOT = Path(__file__).resolve().parents[1]
LINES = {"default": "before", "yarn": "after (YaRN, no training)"}
"""Table of the study to the label of its line."""


def steps(table: str) -> tuple[list[int], list[float]]:
    """Return positions and perplexities of an untrained table on novels, with both ends of each range of positions."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "study_smollm2.json").read_text(encoding="utf-8"))["text"]
    measured = {"table": table, "text": "novels", "state": "zero", "length": 16384}
    (row,) = [row for row in rows if measured.items() <= row.items()]
    positions = [int(end) for span in row["perplexity"] for end in span.split("-")]
    return positions, [value for value in row["perplexity"].values() for _ in range(2)]


def main() -> None:
    """Draw both lines and write the picture."""
    curves = {name: steps(table) for table, name in LINES.items()}
    figure = perplexity_by_position(
        curves, trained_length=8192, title="SmolLM2-135M reads twice its context after a patch"
    )
    figure.set_size_inches(8.5, 3.3)
    figure.savefig(ROOT / "docs" / "before_after.png", dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
