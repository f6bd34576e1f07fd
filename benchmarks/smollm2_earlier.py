"""An earlier report of the study of SmolLM2, whose cells a new one takes over."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from smollm2_cells import Cell, Study

Results = dict[Cell, dict[str, Any]]
COLUMNS = ("table", "state", "length", "factor", "seed")
ROWS = {"text": "text", "passkey": "by", "caches": "scheme"}
"""The lists of a report, and what tells a cell's rows apart beside its columns."""
LEARNING = ("train-", "fit-", "slopes-")
KINDS = (*LEARNING, "heads-")
"""How the names begin of cells that have an entry of their own in a report."""


def learns(study: Study, cell: Cell) -> bool:
    """Whether a cell trains or fits something, or measures what another has trained or fitted."""
    return cell.kind in ("train", "fit", "slopes") or study.needs(cell) is not None


def earlier_report(
    path: Path | None, about: dict[str, str], study: Study, reported: Collection[Cell]
) -> dict[str, Any]:
    """Return the report in a file; an empty one where there is none.

    A report on adapters and fitted tables that learned from another text may be added to: by cells that learn from
    nothing, or by all that it holds of those that do.

    Args:
        path: of the report.
        about: identity of the present study.
        study: the present one.
        reported: cells that are finished, or will be.

    Raises:
        ValueError: it is of other weights, texts or sizes.
    """
    if path is None or not path.exists():
        return {"sha256": about, "unfinished": [], "minutes": 0.0, **{name: [] for name in ROWS}}
    before: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    learned = any(learns(study, cell) for cell in reported)
    lacking = sorted(learned_cells(before, study) - {cell.name for cell in reported})
    for name, theirs in before["sha256"].items():
        if theirs == about[name] or (name == "training" and not learned):
            continue
        if name != "training" or lacking:
            again = f", or measure these again: {', '.join(lacking)}" if name == "training" else ""
            raise ValueError(f"{path} is a report on other weights, texts or sizes ({name}): give another file{again}")
        before["sha256"][name] = about[name]
    return before


def cells_in(report: dict[str, Any], study: Study) -> list[Cell]:
    """Return the cells of which a report has rows."""
    cells = [cell_of_text(row, study) for row in report["text"]]
    cells += [cell_of("engine" if row["by"] == "llama.cpp" else "passkey", row) for row in report["passkey"]]
    return list(dict.fromkeys(cells + [cell_of("kv", row) for row in report["caches"]]))


def names_in(report: dict[str, Any], study: Study) -> set[str]:
    """Return the names of all cells that a report has results of."""
    return {cell.name for cell in cells_in(report, study)} | {name for name in report if name.startswith(KINDS)}


def learned_cells(report: dict[str, Any], study: Study) -> set[str]:
    """Return the names of a report's cells that train, fit, or measure what was trained or fitted."""
    learned = {cell.name for cell in cells_in(report, study) if learns(study, cell)}
    return learned | {name for name in report if name.startswith(LEARNING)}


def cell_of(kind: str, row: dict[str, Any]) -> Cell:
    """Return the cell of a row."""
    return Cell(kind, *(row[name] for name in COLUMNS))


def cell_of_text(row: dict[str, Any], study: Study) -> Cell:
    """Return the cell of a row of perplexity."""
    return cell_of(
        "text" if row["text"] == "novels" else "short" if row["length"] == study.sizes.short else "wiki", row
    )


def earlier_losses(before: dict[str, Any], study: Study) -> Results:
    """Return the losses in an earlier report, by cell."""
    return {cell_of_text(row, study): row for row in before["text"]}


def joined(report: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return a report with the cells of an earlier one that it lacks."""
    for name, more in ROWS.items():

        def key(row: dict[str, Any], more: str = more) -> tuple[Any, ...]:
            return (*(row[column] for column in COLUMNS), row[more])

        measured = {key(row) for row in report[name]}
        report[name] = [row for row in before[name] if key(row) not in measured] + report[name]
    return {**report, **{name: value for name, value in before.items() if name not in report}}
