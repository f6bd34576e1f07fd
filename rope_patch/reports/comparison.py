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

from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_context

from rope_patch.evaluation.answers import few_answers
from rope_patch.evaluation.compare import Column, Comparison, Row
from rope_patch.evaluation.intervals import OF_PROMPTS, OF_WINDOWS
from rope_patch.evaluation.metrics import METRICS
from rope_patch.evaluation.numbers import number_text, perplexity_text
from rope_patch.evaluation.retrieval import RetrievalCell, RetrievalResult
from rope_patch.evaluation.tasks import TASKS
from rope_patch.files import write_atomically
from rope_patch.frequencies import unrotated, wavelength
from rope_patch.packaged import data_path
from rope_patch.plots import base as plots
from rope_patch.reports.glossary import Terms
from rope_patch.reports.summary import summary

TITLE = "Methods compared"
_LONGEST = 80  # characters of a method's name before it is shortened in tables and figures


class Cell(NamedTuple):
    """What a table shows of one value.

    Attributes:
        text: the value.
        note: below it, small: an interval, or nothing.
        mark: ``"winner"``, ``"tied"`` (not significantly different from the best), ``"best"`` (what others are compared
            with) or "".
    """

    text: str
    note: str = ""
    mark: str = ""


class Picture(NamedTuple):
    """A figure as a self-contained image.

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
    """Return a page of ``assets``: everything escaped, terms explained, an unknown name an error."""
    environment = Environment(
        loader=FileSystemLoader(data_path("assets")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    terms = Terms()
    environment.filters["breakable"] = _breakable
    # With a context, so that jinja2 does not apply it to constant texts when it compiles, in blocks that are not shown.
    environment.filters["linked"] = pass_context(lambda _, text: terms.link(text))
    environment.globals["terms_used"] = terms.used
    return environment.get_template(template).render(**values)


def picture(figure: Any, alt: str, caption: str) -> Picture:
    """Return a figure as a self-contained image."""
    data = base64.b64encode(plots.svg(figure).encode()).decode()
    return Picture(f"data:image/svg+xml;base64,{data}", alt, caption)


def _section(comparison: Comparison) -> dict[str, Any]:
    """Everything the template shows of one comparison."""
    rows, columns = comparison.rows, comparison.columns()
    names = short_names([row.method for row in rows])
    return {
        "heading": f"{comparison.model or 'Model without a name'}: {', '.join(comparison.spec.tasks)}",
        "summary": summary(comparison, dict(zip((row.method for row in rows), names, strict=True))),
        "facts": _facts(comparison),
        "warnings": comparison.warnings,
        "answers": few_answers([(name, row.scores) for name, row in zip(names, rows, strict=True)]),
        "percent": f"{100 * comparison.confidence:g} %",
        "joined": [task for task in comparison.spec.tasks if TASKS[task].joined],
        "unjoined": [task for task in comparison.spec.tasks if not TASKS[task].joined],
        "several": len(rows) > 1,
        "population": f"{OF_WINDOWS} {OF_PROMPTS}",
        "shortened": [(name, row.method) for name, row in zip(names, rows, strict=True) if name != row.method],
        "effective": comparison.effective_lengths(),
        "short_of": {row.method: name for name, row in zip(names, rows, strict=True)},
        "groups": _groups(columns),
        "difference_groups": _groups(columns, of_differences=True),
        "scores": _by_row(names, [_scores(comparison, column) for column in columns]),
        "differences": _by_row(names, [_differences(rows, column) for column in columns]),
        "curves": _curves(comparison, names),
        "no_curves": "Perplexity was not measured."
        if rows[0].scores.perplexity is None
        else "No method has a finite perplexity: there is nothing to draw.",
        "maps": _maps(comparison, names),
        "cells": _every_cell(rows, names),
        "wavelengths": _wavelengths(comparison, names),
        "tables": _tables(rows, names),
    }


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    """What was measured, on what, and with what."""
    spec, scores = comparison.spec, comparison.rows[0].scores
    retrieval = next(iter(scores.retrieval.values()))
    depths = ", ".join(f"{100 * depth:.3g} %" for depth in spec.depths)
    source = f", of the files of Python {comparison.python_version}" if comparison.python_version else ""
    special = f"ids {', '.join(map(str, retrieval.prefix))}" if retrieval.prefix else "none"
    environment = ", ".join(f"{name} {value}" for name, value in comparison.environment.items())
    tasks = f"{'tasks' if len(spec.tasks) > 1 else 'task'} {', '.join(spec.tasks)}"
    facts = [("Trained length", f"{comparison.trained_length} tokens, as the config states it before any patch")]
    if scores.perplexity is not None:
        score = scores.perplexity
        windows = "1 window" if score.windows == 1 else f"{score.windows} windows"
        overlap = "no overlap" if score.stride >= score.window else "overlapping"
        chunk = "in one pass" if score.chunk >= score.window else f"in passes of {score.chunk} tokens"
        facts += [
            ("Text", f"{comparison.text_name}{source}; SHA-256 {comparison.text[:16]}…"),
            (
                "Perplexity",
                f"{windows} of {score.window} tokens, read {chunk}; stride {score.stride} ({overlap}); "
                f"{score.tokens} tokens scored",
            ),
        ]
    if scores.key_tokens is not None:
        facts.append(("LongPPL", str(scores.key_tokens)))
    return [
        *facts,
        (
            "Retrieval",
            f"{tasks}, mode {spec.mode}; lengths {', '.join(map(str, spec.lengths))} tokens; depths {depths}; "
            f"{spec.samples} samples at each; seed {spec.seed}",
        ),
        ("Haystack", haystack_of(retrieval)),
        ("Special tokens", f"{special}, in front of each window and prompt"),
        ("Environment", environment or "not recorded"),
    ]


def haystack_of(retrieval: RetrievalResult) -> str:
    """Return what needles were hidden in, and how prompts were put to the model."""
    put = "the chat template of the tokenizer" if retrieval.chat else "plain text, without a chat template"
    return f"{retrieval.haystack}; SHA-256 {retrieval.haystack_sha256[:16]}…; prompts are {put}"


def _groups(columns: Sequence[Column], *, of_differences: bool = False) -> list[tuple[str, list[str]]]:
    """Titles of neighbouring columns of one metric and task, each with the heads of its columns."""
    titled = [
        (METRICS[c.metric].title(c.span, of_differences=of_differences), METRICS[c.metric].span_text(c.span))
        for c in columns
    ]
    return [
        (title, [head for _, head in group]) for title, group in itertools.groupby(titled, key=lambda item: item[0])
    ]


def _scores(comparison: Comparison, column: Column) -> list[Cell]:
    metric = METRICS[column.metric]
    tied = {difference.method for difference in column.differences if not difference.significant}
    tied |= {comparison.rows[column.best].method} if tied else set()
    cells = []
    for row, value in zip(comparison.rows, column.values, strict=True):
        mark = "winner" if row.method == column.winner else "tied" if row.method in tied else ""
        ends = metric.interval(row.scores, column.span, comparison.confidence)
        note = "" if ends is None else " to ".join(map(metric.format_long, ends))
        cells.append(Cell(metric.format_long(value), note, mark))
    return cells


def _differences(rows: Sequence[Row], column: Column) -> list[Cell]:
    """Of each row from the best, which shows its own value."""
    text = METRICS[column.metric].format_difference
    differences = {difference.method: difference for difference in column.differences}
    cells = []
    for i, row in enumerate(rows):
        if i == column.best or row.method not in differences:
            cells.append(Cell("best", mark="best"))
            continue
        difference = differences[row.method]
        ends = f"{text(difference.low)} to {text(difference.high)}"
        cells.append(Cell(text(difference.estimate), ends, "" if difference.significant else "tied"))
    return cells


def _curves(comparison: Comparison, names: Sequence[str]) -> Picture | None:
    """Perplexity by position, of the methods whose perplexity is a number."""
    curves, ends = {}, {}
    for name, row in zip(names, comparison.rows, strict=True):
        text = row.scores.perplexity
        buckets = [b for b in text.buckets if math.isfinite(b.nll)] if text is not None else []
        if buckets:
            ends[name] = buckets[-1].perplexity
            curves[name] = [(b.start + b.stop) / 2 for b in buckets], [b.perplexity for b in buckets]
    if not curves:
        return None
    longest = max(positions[-1] for positions, _ in curves.values())
    ranked = sorted(ends.items(), key=lambda item: item[1])
    ranking = "; ".join(f"{name} {perplexity_text(value)}" for name, value in ranked)
    left = [name for name in names if name not in curves]
    figure = plots.perplexity_by_position(
        curves, trained_length=comparison.trained_length, title="Perplexity by position in the window"
    )
    return picture(
        figure,
        f"Lines of perplexity against position, one per method. At position {longest:g}, best first: {ranking}.",
        "Lower is better; the scale is logarithmic. All methods read the same windows, so they rise and fall together."
        + (f" Not drawn, since no value is finite: {', '.join(left)}." if left else ""),
    )


def _maps(comparison: Comparison, names: Sequence[str]) -> list[Picture]:
    """Exact match and log-probability of the answer over lengths × depths, of each task."""
    return [picture for task in comparison.spec.tasks for picture in _task_maps(comparison, names, task)]


def _task_maps(comparison: Comparison, names: Sequence[str], task: str) -> list[Picture]:
    lengths = comparison.spec.lengths
    depths = list(dict.fromkeys(cell.depth for cell in comparison.rows[0].scores.retrieval[task].cells))
    rows, ends = "depth of the needle", "0 % is the start of the prompt, 100 % just before the question"
    if not TASKS[task].placed:
        rows, ends = (
            "word of the answer",
            "0 % is the first, 100 % the last; these words stand everywhere in the prompt",
        )
    of_task = f", {task}" if len(comparison.spec.tasks) > 1 else ""

    def draw(score: Callable[[RetrievalCell], float], caption: str, **options: Any) -> Picture:
        grids = {}
        for name, row in zip(names, comparison.rows, strict=True):
            cells = {(cell.depth, cell.length): score(cell) for cell in row.scores.retrieval[task].cells}
            grids[name] = [[cells.get((depth, length), math.nan) for length in lengths] for depth in depths]
        values = [value for grid in grids.values() for line in grid for value in line if math.isfinite(value)]
        limits = options.pop("limits", (min(values, default=-1.0), 0.0))
        figure = plots.retrieval_heatmap(grids, lengths=lengths, depths=depths, limits=limits, rows=rows, **options)
        alt = f"{options['title']}: a panel per method, prompt length across, {rows} down. "
        return picture(figure, f"{alt}Every number is in the table of all retrieval scores.", caption)

    return [
        draw(
            lambda cell: cell.correct / len(cell.samples),
            f"Share of answers that are exactly right, by length of the prompt and {rows} ({ends}). "
            "One scale of colour for all.",
            limits=(0.0, 1.0),
            title=f"Exact match{of_task}",
        ),
        draw(
            lambda cell: cell.logprob,
            "Mean log-probability of the right answer; 0 is certain. It moves before exact match does.",
            title=f"Log-probability of the answer{of_task}",
            label="log-probability [nats]",
            digits=1,
        ),
    ]


def _every_cell(rows: Sequence[Row], names: Sequence[str]) -> list[tuple[str, str, int, str, list[str]]]:
    """Method, task, length, depth; then exact match, first choice, digits and log-probability."""
    return [
        (
            name,
            task,
            cell.length,
            f"{100 * cell.depth:.3g} %",
            [
                f"{cell.correct} of {len(cell.samples)}",
                f"{cell.first_choice} of {len(cell.samples)}",
                number_text(cell.digits),
                number_text(cell.logprob),
            ],
        )
        for name, row in zip(names, rows, strict=True)
        for task, result in row.scores.retrieval.items()
        for cell in sorted(result.cells, key=lambda cell: (cell.length, cell.depth))
    ]


def _wavelengths(comparison: Comparison, names: Sequence[str]) -> list[Picture | str]:
    """A figure per layer type whose tables differ, a sentence for each of the others."""
    rows = comparison.rows
    parts: list[Picture | str] = []
    for i, slot in enumerate(rows[0].tables):
        layers = f"layers of type {slot.layer_type}" if slot.layer_type else "all layers"
        tables = {name: row.tables[i].inv_freq for name, row in zip(names, rows, strict=True)}
        if len(rows) > 1 and len({row.tables[i].fingerprint for row in rows}) == 1:
            parts.append(f"In {layers} every method left the same table.")
            continue
        before = next((row.tables[i].inv_freq for row in rows if row.method == "default"), None)
        figure = plots.wavelength_changes(
            tables, before=before, context=comparison.trained_length, title=f"Wavelengths, {layers}"
        )
        grey = "The grey line is the table before any patch. " if before is not None else ""
        alt = f"Wavelength of each pair in {layers}, a panel per method. The table of wavelengths sums them up."
        caption = (
            f"{grey}The dotted line is the trained length: a pair below it makes at least one full turn within it. "
            "Triangles at the top are pairs that are not rotated."
        )
        parts.append(picture(figure, alt, caption))
    return parts


def _tables(rows: Sequence[Row], names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Method; layers, wavelengths of the fastest and the slowest rotated pair, unrotated pairs, factor, fingerprint."""
    lines = []
    for name, row in zip(names, rows, strict=True):
        for slot in row.tables:
            rests = unrotated(slot.inv_freq)
            turning = wavelength(slot.inv_freq.double())[~rests]
            edges = [float(turning.min()), float(turning.max())] if len(turning) else [math.nan, math.nan]
            ends = [f"{edge:,.0f}" if edge >= 1000 else number_text(edge) for edge in edges]
            unrotated_pairs = f"{int(rests.sum())} of {slot.pairs}"
            scaling = f"{slot.attention_scaling:.4g}"
            lines.append((name, [slot.layer_type or "all", *ends, unrotated_pairs, scaling, slot.fingerprint]))
    return lines


def _by_row(names: Sequence[str], columns: Sequence[Sequence[Cell]]) -> list[tuple[str, tuple[Cell, ...]]]:
    return list(zip(names, zip(*columns, strict=True), strict=True))


def short_names(names: Sequence[str]) -> list[str]:
    """Return names that fit a table: very long ones are cut in the middle, and numbered where two would be equal."""
    labels: list[str] = []
    for name in names:
        label = name if len(name) <= _LONGEST else f"{name[: _LONGEST // 2]}…{name[-_LONGEST // 4 :]}"
        twins = (f"{label} #{i}" for i in itertools.count(2))
        labels.append(label if label not in labels else next(twin for twin in twins if twin not in labels))
    return labels


def _breakable(name: str) -> list[str]:
    """A method string or a scheme in pieces between which a line may break."""
    return re.findall(r"[^+:/;]*[+:/;]|[^+:/;]+", name)
