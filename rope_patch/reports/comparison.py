"""Comparisons as one HTML file that needs nothing else: no script, no font, no network.

Example:
    ``report.write("report.html", [comparison], command="rope-patch compare ...")``. Needs matplotlib.
"""

from __future__ import annotations

import base64
import itertools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rope_patch.evaluation.compare import Column, Comparison, Row
from rope_patch.evaluation.prompts import TASKS
from rope_patch.evaluation.retrieval import RetrievalCell
from rope_patch.files import write_atomically
from rope_patch.frequencies import unrotated, wavelength
from rope_patch.packaged import data_path
from rope_patch.plots import base as plots

TITLE = "Methods compared"
_LONGEST = 80  # characters of a method's name before it is shortened in tables and figures


class Cell(NamedTuple):
    """What a table shows of one value.

    Attributes:
        text: the value.
        note: below it, small: an interval, or nothing.
        mark: ``"winner"``, ``"tied"`` (not to be told from the best), ``"best"`` (what others are compared with) or "".
    """

    text: str
    note: str = ""
    mark: str = ""


class Picture(NamedTuple):
    """A figure as an image that holds itself.

    Attributes:
        source: a ``data:`` address.
        alt: what it shows, in words.
        caption: how to read it.
    """

    source: str
    alt: str
    caption: str


def report(comparisons: Sequence[Comparison], *, command: str | None = None, title: str = TITLE) -> str:
    """Return comparisons as one HTML document, the same text for the same comparisons.

    Args:
        comparisons: one section each: a checkpoint, a task.
        command: that made them.
        title: of the document.

    Raises:
        ValueError: no comparison.
    """
    if not comparisons:
        raise ValueError("a report needs at least one comparison")
    return render("report.html.jinja", title=title, command=command, sections=[_section(c) for c in comparisons])


def write(
    path: str | Path, comparisons: Sequence[Comparison], *, command: str | None = None, title: str = TITLE
) -> None:
    """Write :func:`report` to a file, whole or not at all.

    Raises:
        ValueError: no comparison.
        OSError: the folder cannot be written.
    """
    write_atomically(path, report(comparisons, command=command, title=title))


def render(template: str, **values: Any) -> str:
    """Return a page of ``assets``: everything escaped, an unknown name an error."""
    environment = Environment(
        loader=FileSystemLoader(data_path("assets")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    return environment.get_template(template).render(**values)


def picture(figure: Any, alt: str, caption: str) -> Picture:
    """Return a figure as an image that holds itself."""
    data = base64.b64encode(plots.svg(figure).encode()).decode()
    return Picture(f"data:image/svg+xml;base64,{data}", alt, caption)


def _section(comparison: Comparison) -> dict[str, Any]:
    """Everything the template shows of one comparison."""
    rows, columns = comparison.rows, comparison.columns()
    names = short_names([row.method for row in rows])
    return {
        "heading": f"{comparison.model or 'Model without a name'}: {rows[0].retrieval.task}",
        "task": rows[0].retrieval.task,
        "facts": _facts(comparison),
        "percent": f"{100 * comparison.confidence:g} %",
        "joined": getattr(TASKS.get(rows[0].retrieval.task), "joined", False),
        "several": len(rows) > 1,
        "shortened": [(name, row.method) for name, row in zip(names, rows, strict=True) if name != row.method],
        "heads": [(column.kind, _span(column)) for column in columns],
        "scores": _by_row(names, [_scores(comparison, column) for column in columns]),
        "differences": _by_row(names, [_differences(rows, column) for column in columns]),
        "curves": _curves(comparison, names),
        "maps": _maps(comparison, names),
        "cells": _every_cell(rows, names),
        "wavelengths": _wavelengths(comparison, names),
        "tables": _tables(rows, names),
    }


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    """What was measured, on what, and with what."""
    score, found = comparison.rows[0].perplexity, comparison.rows[0].retrieval
    depths = ", ".join(f"{100 * depth:.3g} %" for depth in _depths(comparison.rows[0]))
    asked = {len(cell.samples) for cell in found.cells}
    windows = "1 window" if score.windows == 1 else f"{score.windows} windows"
    overlap = "no overlap" if score.stride >= score.window else "overlapping"
    chunk = "in one pass" if score.chunk >= score.window else f"in passes of {score.chunk} tokens"
    source = f", of the files of Python {comparison.python_version}" if comparison.python_version else ""
    special = f"ids {', '.join(map(str, found.prefix))}" if found.prefix else "none"
    environment = ", ".join(f"{name} {value}" for name, value in comparison.environment.items())
    return [
        ("Trained length", f"{comparison.trained_length} tokens, as the config states it before any patch"),
        ("Text", f"{comparison.text_name}{source}; SHA-256 {comparison.text[:16]}…"),
        (
            "Perplexity",
            f"{windows} of {score.window} tokens, read {chunk}; stride {score.stride} ({overlap}); "
            f"{score.tokens} tokens scored",
        ),
        (
            "Retrieval",
            f"task {found.task}, mode {found.mode}; lengths {', '.join(map(str, comparison.lengths))} tokens; "
            f"depths {depths}; {'–'.join(map(str, sorted({min(asked), max(asked)})))} samples at each; "
            f"seed {found.seed}",
        ),
        ("Haystack", f"{found.haystack}; SHA-256 {found.haystack_sha256[:16]}…"),
        ("Special tokens", f"{special}, in front of each window and prompt"),
        ("Environment", environment or "not recorded"),
    ]


def _scores(comparison: Comparison, column: Column) -> list[Cell]:
    tied = {difference.method for difference in column.differences if not difference.separate}
    tied |= {comparison.rows[column.best].method} if tied else set()
    made = []
    for row, value in zip(comparison.rows, column.values, strict=True):
        mark = "winner" if row.method == column.winner else "tied" if row.method in tied else ""
        if column.kind == "perplexity":
            made.append(Cell(perplexity_text(value), mark=mark))
        else:
            low, high = row.retrieval.interval(column.stop, comparison.confidence)
            made.append(Cell(number_text(value), f"{number_text(low)} to {number_text(high)}", mark))
    return made


def _differences(rows: Sequence[Row], column: Column) -> list[Cell]:
    """Of each row from the best, which shows its own value."""
    digits = 4 if column.kind == "perplexity" else 2
    found = {difference.method: difference for difference in column.differences}
    made = []
    for i, row in enumerate(rows):
        if i == column.best or row.method not in found:
            made.append(Cell("best", mark="best"))
            continue
        difference = found[row.method]
        ends = f"{number_text(difference.low, digits, sign=True)} to {number_text(difference.high, digits, sign=True)}"
        mark = "" if difference.separate else "tied"
        made.append(Cell(number_text(difference.estimate, digits, sign=True), ends, mark))
    return made


def _curves(comparison: Comparison, names: Sequence[str]) -> Picture | None:
    """Perplexity by position, of the methods whose perplexity is a number."""
    curves, ends = {}, {}
    for name, row in zip(names, comparison.rows, strict=True):
        buckets = [b for b in row.perplexity.buckets if math.isfinite(b.nll)]
        if buckets:
            ends[name] = buckets[-1].perplexity
            curves[name] = [(b.start + b.stop) / 2 for b in buckets], [b.perplexity for b in buckets]
    if not curves:
        return None
    longest = max(positions[-1] for positions, _ in curves.values())
    ranked = sorted(ends.items(), key=lambda item: item[1])
    told = "; ".join(f"{name} {perplexity_text(value)}" for name, value in ranked)
    left = [name for name in names if name not in curves]
    figure = plots.perplexity_by_position(
        curves, trained_length=comparison.trained_length, title="Perplexity by position in the window"
    )
    return picture(
        figure,
        f"Lines of perplexity against position, one per method. At position {longest:g}, best first: {told}.",
        "Lower is better; the scale is logarithmic. All methods read the same windows, so they rise and fall together."
        + (f" Not drawn, since no value is finite: {', '.join(left)}." if left else ""),
    )


def _maps(comparison: Comparison, names: Sequence[str]) -> list[Picture]:
    """Exact match and log-probability of the answer over lengths × depths."""
    lengths, depths = sorted(comparison.lengths), _depths(comparison.rows[0])

    def draw(score: Callable[[RetrievalCell], float], caption: str, **options: Any) -> Picture:
        grids = {}
        for name, row in zip(names, comparison.rows, strict=True):
            found = {(cell.depth, cell.length): score(cell) for cell in row.retrieval.cells}
            grids[name] = [[found.get((depth, length), math.nan) for length in lengths] for depth in depths]
        values = [value for grid in grids.values() for line in grid for value in line if math.isfinite(value)]
        limits = options.pop("limits", (min(values, default=-1.0), 0.0))
        figure = plots.retrieval_heatmap(grids, lengths=lengths, depths=depths, limits=limits, **options)
        alt = f"{options['title']}: a panel per method, prompt length across, depth of the needle down. "
        return picture(figure, f"{alt}Every number is in the table of all retrieval scores.", caption)

    return [
        draw(
            lambda cell: cell.correct / len(cell.samples),
            "Share of answers that are exactly right, by length of the prompt and depth of the needle "
            "(0 % is the start of the prompt, 100 % just before the question). One scale of colour for all.",
            limits=(0.0, 1.0),
            title="Exact match",
        ),
        draw(
            lambda cell: cell.logprob,
            "Mean log-probability of the right answer; 0 is certain. It moves before exact match does.",
            title="Log-probability of the answer",
            label="log-probability [nats]",
            digits=1,
        ),
    ]


def _every_cell(rows: Sequence[Row], names: Sequence[str]) -> list[tuple[str, int, str, list[str]]]:
    """Method, length, depth; then exact match, digits and log-probability."""
    return [
        (
            name,
            cell.length,
            f"{100 * cell.depth:.3g} %",
            [f"{cell.correct} of {len(cell.samples)}", number_text(cell.digits), number_text(cell.logprob)],
        )
        for name, row in zip(names, rows, strict=True)
        for cell in sorted(row.retrieval.cells, key=lambda cell: (cell.length, cell.depth))
    ]


def _wavelengths(comparison: Comparison, names: Sequence[str]) -> list[Picture | str]:
    """A figure per layer type whose tables differ, a sentence for each of the others."""
    rows = comparison.rows
    made: list[Picture | str] = []
    for i, slot in enumerate(rows[0].slots):
        layers = f"layers of type {slot.layer_type}" if slot.layer_type else "all layers"
        tables = {name: row.slots[i].inv_freq for name, row in zip(names, rows, strict=True)}
        if len(rows) > 1 and len({row.slots[i].fingerprint for row in rows}) == 1:
            made.append(f"In {layers} every method left the same table.")
            continue
        before = next((row.slots[i].inv_freq for row in rows if row.method == "default"), None)
        figure = plots.wavelength_changes(
            tables, before=before, context=comparison.trained_length, title=f"Wavelengths, {layers}"
        )
        grey = "The grey line is the table before any patch. " if before is not None else ""
        alt = f"Wavelength of each pair in {layers}, a panel per method. The table of wavelengths sums them up."
        caption = (
            f"{grey}The dotted line is the trained length: a pair below it makes at least one full turn within it. "
            "Triangles at the top are pairs that stand still."
        )
        made.append(picture(figure, alt, caption))
    return made


def _tables(rows: Sequence[Row], names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Method; layers, wavelength of the fastest and the slowest pair that turns, still pairs, scaling, fingerprint."""
    made = []
    for name, row in zip(names, rows, strict=True):
        for slot in row.slots:
            rests = unrotated(slot.inv_freq)
            turning = wavelength(slot.inv_freq.double())[~rests]
            edges = [float(turning.min()), float(turning.max())] if len(turning) else [math.nan, math.nan]
            ends = [f"{edge:,.0f}" if edge >= 1000 else number_text(edge) for edge in edges]
            still_pairs = f"{int(rests.sum())} of {slot.pairs}"
            scaling = f"{slot.attention_scaling:.4g}"
            made.append((name, [slot.layer_type or "all", *ends, still_pairs, scaling, slot.fingerprint]))
    return made


def _by_row(names: Sequence[str], columns: Sequence[Sequence[Cell]]) -> list[tuple[str, tuple[Cell, ...]]]:
    return list(zip(names, zip(*columns, strict=True), strict=True))


def _depths(row: Row) -> list[float]:
    return sorted({cell.depth for cell in row.retrieval.cells})


def _span(column: Column) -> str:
    return f"{column.start}–{column.stop}" if column.kind == "perplexity" else str(column.stop)


def short_names(names: Sequence[str]) -> list[str]:
    """Names that fit a table: of a very long one its two ends, numbered when that makes it another's twin."""
    made: list[str] = []
    for name in names:
        label = name if len(name) <= _LONGEST else f"{name[: _LONGEST // 2]}…{name[-_LONGEST // 4 :]}"
        twins = (f"{label} #{i}" for i in itertools.count(2))
        made.append(label if label not in made else next(twin for twin in twins if twin not in made))
    return made


def _breakable(name: str) -> list[str]:
    """A name in the grammar of methods or schemes in pieces between which a line may break."""
    return re.findall(r"[^+:/;]*[+:/;]|[^+:/;]+", name)


def perplexity_text(value: float) -> str:
    """A perplexity with three or four digits that count."""
    if not math.isfinite(value):
        return number_text(value)
    return f"{value:.{2 if value < 100 else 1 if value < 1000 else 0}f}" if value < 1e6 else f"{value:.2e}"


def number_text(value: float, digits: int = 2, *, sign: bool = False) -> str:
    """A number for people: a true minus, ∞ where there is no end, a dash where there is no value."""
    if math.isnan(value):
        return "–"
    text = f"{value:{'+' if sign else ''}z.{digits}f}".replace("inf", "∞")
    return text.replace("-", "−")
