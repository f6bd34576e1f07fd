"""The page of ``rope-patch compare`` and ``extend``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import fmean

from rope_patch.evaluation.compare import UNPATCHED, Column, Comparison
from rope_patch.evaluation.effective_length import effective_sentence
from rope_patch.evaluation.intervals import paired_means
from rope_patch.evaluation.metrics import (
    METRICS,
    Metric,
    PairedDifference,
    Span,
    change_sentence,
    change_text,
    spans_at,
    value_text,
)
from rope_patch.evaluation.suite import EvalResult
from rope_patch.evaluation.tasks import TASKS, Task, members
from rope_patch.runtime import page as pages
from rope_patch.runtime import plots
from rope_patch.runtime.captions import count_text, names_text, windows_text
from rope_patch.runtime.number_format import number_text
from rope_patch.runtime.page import (
    INTERVALS,
    Cell,
    Cells,
    DataTable,
    Figure,
    Note,
    Page,
    Section,
    figure,
    short_names,
)


def page(comparisons: Sequence[Comparison], *, title: str = "Methods compared", folded: bool = False) -> Page:
    """Return comparisons as a page.

    Args:
        comparisons: the comparisons, each of which becomes a section: a checkpoint, a task.
        title: the title of the page.
        folded: whether the changes from the unpatched model are folded, as beside a choice that has its own.
    """
    return Page(title, [_section(comparison, folded=folded) for comparison in comparisons])


def _section(comparison: Comparison, *, folded: bool) -> Section:
    facts = [
        ("Methods", ", ".join(comparison.scores)),
        ("Trained length", f"{comparison.trained_length} tokens, as the config states it before any patch"),
        *scores_facts(comparison.rows[0].scores, comparison.text_name, comparison.text),
    ]
    names = short_names(row.method for row in comparison.rows)
    comparison = replace(comparison, rows=tuple(replace(row, method=names[row.method]) for row in comparison.rows))
    every = comparison.columns()
    suites = dict.fromkeys(str(column.span.task) for column in every if column.metric == "mean")
    # Of a suite that is asked whole the mean is shown, and its tasks in a table of their own.
    columns = [column for column in every if TASKS.get(str(column.span.task), Task).suite not in suites]
    alone = [task for task in comparison.spec.tasks if TASKS[task].suite not in suites]
    parts = [
        *(Note(f"Note: {warning}.") for warning in comparison.warnings),
        _scores(comparison, columns),
        *_changes(comparison, columns, folded=folded),
        *(_by_task(comparison, suite, every) for suite in suites),
        *_curves(comparison),
        *(_by_length(comparison, suite) for suite in suites if len(comparison.spec.lengths) > 1),
        # The parts of a joined answer have no depths of their own.
        *(
            drawn
            for suite in suites
            for drawn in _map(comparison, suite, [task for task in members(suite) if not TASKS[task].joined])
        ),
        *(drawn for task in alone for drawn in _map(comparison, task, [task])),
        pages.facts(facts, comparison.environment),
    ]
    text = comparison.rows[0].scores.perplexity
    sizes = []
    if text:
        sizes.append(count_text(text.windows, "window"))
        if text.key_tokens is not None:
            sizes.append(f"{count_text(text.key_tokens.tokens, 'key token')} of {text.tokens}")
    sizes += [f"{task} in {count_text(comparison.spec.samples, 'haystack')}" for task in [*suites, *alone]]
    name = comparison.model.partition(" ")[2] or comparison.model
    title = f"{name}, trained at {comparison.trained_length} tokens: {', '.join(sizes)}"
    answer = summary(comparison, columns)
    tied = [one for one in _longest(columns) if not any(other.significant for other in one.differences.values())]
    if tied and len(comparison.rows) > 1 and not folded:
        answer.append("More windows (--windows) or more prompts (--samples) may separate what these do not.")
    return Section(title, answer, parts)


# --- the answer ------------------------------------------------------------------------------------------------------


def summary(comparison: Comparison, columns: Sequence[Column]) -> list[str]:
    """Return for each metric and task which method is best at the longest length.

    A metric that is no finite number for some method is left out.

    Args:
        comparison: the comparison, of any number of methods.
        columns: the columns of the comparison.
    """
    sentences = [_best(comparison, column) for column in _longest(columns)]
    if any(column.metric == "mean" and column.span.task == "ruler" for column in columns):
        sentences = [effective_sentence(row.label, row.scores) for row in comparison.rows] + sentences
    return sentences


def _longest(columns: Sequence[Column]) -> list[Column]:
    """Return the column of the longest length of each metric and task, where all of its values are finite."""
    longest: dict[tuple[str, str | None], Column] = {}
    for column in columns:
        # Columns come in the order of their lengths, so that the longest one stays.
        longest[column.metric, column.span.task] = column
    return [column for column in longest.values() if all(map(math.isfinite, column.values))]


def _best(comparison: Comparison, column: Column) -> str:
    metric = METRICS[column.metric]
    values = dict(zip([row.label for row in comparison.rows], column.values, strict=True))
    best = comparison.rows[column.best].label
    value = value_text(metric, values[best])
    where = "at positions" if metric.of_text else "in prompts of"
    label = metric.title
    task = column.span.task
    if task and len(comparison.spec.tasks) > 1:
        label += f" of {task}"
    text = f"{label} {where} {column.span} tokens: "
    if len(values) == 1:
        return f"{text}{value}."
    equal = [method for method, one in column.differences.items() if not one.significant]
    if column.winner is not None:
        text += f"{best} is best ({value}), ahead of every other method by the intervals"
    elif len(equal) == len(values) - 1:
        text += f"the intervals separate no method from the best value ({value})"
    else:
        text += f"{best} ({value}) is best, but not separable from {names_text(equal, 3)}"
    if UNPATCHED in values:
        text += f"; {_unpatched(comparison)} has {value_text(metric, values[UNPATCHED])}"
    within = [length for length in comparison.spec.lengths if length <= comparison.trained_length]
    if metric.is_perplexity and within and UNPATCHED in values and best != UNPATCHED:
        price = comparison.difference(best, UNPATCHED, metric.name, Span(within[-1], 0))
        text += f". The price of {best}: {change_sentence(metric, price)} within {within[-1]} tokens"
    return f"{text}."


def _unpatched(comparison: Comparison) -> str:
    """Return what the row ``default`` is, as a text."""
    patch = comparison.environment.get("patch before")
    if patch is None:
        return "the unpatched model"
    return f"the model as it was given ({patch})"


# --- tables ----------------------------------------------------------------------------------------------------------


def _table(
    title: str,
    labels: Iterable[str],
    columns: Sequence[Column],
    cell: Callable[[Column, str], Cell],
    caption: str,
    *,
    folded: bool = False,
) -> DataTable:
    """Return a table with a row for each method, and a cell for each column and label of a method."""
    return DataTable(
        title,
        ["Method", *(column.heading for column in columns)],
        [[label, *(cell(column, label) for column in columns)] for label in labels],
        caption,
        folded,
    )


def _scores(comparison: Comparison, columns: Sequence[Column]) -> DataTable:
    """Return the table of scores: winners with a star, and what is not separable from the best with a sign."""
    scores = comparison.scores

    def cell(column: Column, label: str) -> Cell:
        metric = METRICS[column.metric]
        note = ""
        if metric.name == "retrieval":
            answers = scores[label].retrieval[str(column.span.task)]
            note = " to ".join(map(number_text, answers.interval(column.span.stop)))
        elif metric.name == "mean":
            values = metric.values(scores[label], column.span)
            note = " to ".join(map(number_text, paired_means(values, [0.0] * len(values))))
        behind = [method for method, difference in column.differences.items() if difference.significant]
        style = ""
        if label == column.winner:
            style = "winner"
        # No signs if nothing is behind the best, as with one window: they would say that all are equal.
        elif label not in behind and 0 < len(behind) < len(column.differences):
            style = "tied"
        return Cell(value_text(metric, metric.value(scores[label], column.span)), note, style)

    caption = (
        "ppl: perplexity at these positions [tokens], lower is better; a task: the share of its prompts of this length "
        "[tokens] that are answered exactly; logprob: the log-probability of the right answer [nats]."
    )
    if UNPATCHED in scores:
        caption = f"{UNPATCHED}: {_unpatched(comparison)}; {caption}"
    if len(scores) > 1:
        caption += (
            " ★ is ahead of every other method, ≈ is not separable from the best, by paired "
            f"95 % intervals; in a column without a sign they separate no method from the "
            f"best. {INTERVALS}"
        )
    return _table("Scores", scores, columns, cell, caption)


def _changes(comparison: Comparison, columns: Sequence[Column], *, folded: bool) -> list[DataTable]:
    """Return the table of how each method differs from the unpatched model, or from the first one."""
    labels = [row.label for row in comparison.rows]
    base = base_name = labels[0]
    if UNPATCHED in labels:
        base = UNPATCHED
        base_name = _unpatched(comparison)
    others = [label for label in labels if label != base]
    if not others:
        return []

    def cell(column: Column, label: str) -> Cell:
        change = comparison.difference(label, base, column.metric, column.span)
        return change_cell(METRICS[column.metric], change, "" if change.significant else "tied")

    caption = (
        "On the same windows and prompts, with the 95 % interval of each change by "
        "itself; ppl in percent. ≈ is not shown to differ. The signs above are corrected for all pairs of methods."
    )
    return [_table(f"Change from {base_name}", others, columns, cell, caption, folded=folded)]


def _by_task(comparison: Comparison, suite: str, columns: Sequence[Column]) -> DataTable:
    """Return the table of the tasks of a suite, with the right answers of each method, by length."""
    rows: list[Cells] = []
    for column in columns:
        if column.metric == "retrieval" and TASKS[str(column.span.task)].suite == suite:
            rows.append([column.heading, *map(number_text, column.values)])
    return DataTable(f"Tasks of {suite}", ["Task", *comparison.scores], rows, "The share of right answers, by length.")


def change_cell(metric: Metric, change: PairedDifference, style: str = "") -> Cell:
    """Return a change of a metric; below it stands its interval."""
    estimate, low, high = (change_text(metric, value) for value in change)
    interval = "no interval"
    if math.isfinite(change.high - change.low):
        interval = f"{low} to {high}"
    return Cell(estimate, interval, style)


def before_after(comparison: Comparison, chosen: str, lengths: Sequence[int] = ()) -> DataTable:
    """Return the scores of the unpatched model, of a chosen method, and their difference.

    Args:
        comparison: the comparison, with the unpatched model as ``"default"``.
        chosen: the label of the chosen method.
        lengths: the lengths that are shown; by default all [tokens].
    """
    before = comparison.scores[UNPATCHED]
    after = comparison.scores[chosen]
    rows: list[Cells] = []
    for length in lengths or comparison.spec.lengths:
        for metric, span in spans_at(comparison.spec, length):
            values = [_value(metric, span, before), _value(metric, span, after)]
            change = metric.difference(after, before, span)
            text = change_sentence(metric, change) if math.isfinite(change.estimate) else "–"
            rows.append([_what(metric, span), *values, text])
    caption = "The change, on the same windows and prompts, with its 95 % interval."
    return DataTable("Before and after", ["", "before", "after", "change"], rows, caption)


def _value(metric: Metric, span: Span, scores: EvalResult) -> str:
    """Return a value of the table before and after; of prompts the number that is answered, which may be one of one."""
    if metric.name == "retrieval":
        return scores.retrieval[str(span.task)].answered(span.stop)
    return value_text(metric, metric.value(scores, span))


def _what(metric: Metric, span: Span) -> str:
    if metric.name == "retrieval":
        return f"{span.task} prompts of {span.stop} tokens that are answered"
    if metric.of_text:
        return f"{metric.name} at positions {span}"
    return f"{metric.name} of {span.task} prompts of {span}"


def scores_facts(scores: EvalResult, text_name: str, text_sha256: str) -> list[tuple[str, str]]:
    """Return which text was read and how, and which prompts were asked, in what text and in which form.

    Args:
        scores: the scores of any of the models that were measured alike.
        text_name: the name of the text.
        text_sha256: the digest of the text.
    """
    facts = []
    if scores.perplexity is not None:
        score = scores.perplexity
        chunk = "in one pass"
        if score.chunk < score.window:
            chunk = f"in passes of {score.chunk} tokens"
        read = f"{windows_text(score.windows, score.window)}, read {chunk}"
        facts.append(("Text", f"{text_name}; SHA-256 {text_sha256[:16]}…"))
        facts.append(("Perplexity", f"{read}; {score.tokens} tokens scored"))
    spec = scores.spec
    if not spec.tasks:
        return facts
    retrieval = next(iter(scores.retrieval.values()))
    tasks = ", ".join(spec.tasks)
    depths = ", ".join(f"{100 * depth:.3g} %" for depth in spec.depths)
    samples = f"{count_text(spec.samples, 'sample')} at each"
    lengths = ", ".join(map(str, spec.lengths))
    form = "the chat template of the tokenizer" if retrieval.chat else "plain text, without a chat template"
    special = ", ".join(map(str, retrieval.prefix)) or "none"
    return [
        *facts,
        ("Retrieval", f"{tasks}; lengths {lengths} tokens; depths {depths}; {samples}; seed {spec.seed}"),
        ("Haystack", f"{retrieval.haystack}; SHA-256 {retrieval.haystack_sha256[:16]}…; prompts are {form}"),
        ("Special tokens", f"ids in front of each window and prompt: {special}"),
    ]


# --- figures ---------------------------------------------------------------------------------------------------------


def _curves(comparison: Comparison) -> list[Figure | Note]:
    """Return the figure of perplexity by position, of the methods whose perplexity is a number."""
    if comparison.spec.windows == 0:
        return []
    curves = {}
    for row in comparison.rows:
        text = row.scores.perplexity
        if text is None:
            continue
        buckets = [bucket for bucket in text.buckets if math.isfinite(bucket.nll)]
        if buckets:
            at = [(bucket.start + bucket.stop) / 2 for bucket in buckets]
            curves[row.label] = at, [bucket.perplexity for bucket in buckets]
    if not curves:
        return [Note("No method has a finite perplexity that was measured.")]
    missing = [row.label for row in comparison.rows if row.label not in curves]
    caption = "Lower is better. All methods read the same windows, so they rise and fall together."
    if missing:
        caption += f" Not drawn, no value is finite: {', '.join(missing)}."
    title = "Perplexity by position in the window"
    draw = plots.perplexity_by_position
    return [figure(draw, curves, title=title, caption=caption, trained_length=comparison.trained_length)]


def _by_length(comparison: Comparison, suite: str) -> Figure:
    """Return the figure of the mean of a suite by length."""
    metric = METRICS["mean"]
    spans = [span for span in metric.spans(comparison.spec) if span.task == suite]
    lengths = [span.stop for span in spans]
    curves = {row.label: (lengths, [metric.value(row.scores, span) for span in spans]) for row in comparison.rows}
    title = f"Mean of {suite} by length"
    caption = "The mean over the tasks of the share of right answers; higher is better."
    return figure(plots.score_by_length, curves, title=title, caption=caption, trained_length=comparison.trained_length)


def _map(comparison: Comparison, name: str, tasks: Sequence[str]) -> list[Figure]:
    """Return the figure of exact match over lengths × depths of tasks; none where a length has a single depth."""
    lengths = comparison.spec.lengths
    cells = [cell for task in tasks for cell in comparison.rows[0].scores.retrieval[task].cells]
    if len(cells) == len(lengths) * len(tasks):
        return []  # the table says as much
    depths = list(dict.fromkeys(cell.depth for cell in cells))
    grids = {}
    for row in comparison.rows:
        shares: dict[tuple[float, int], list[float]] = {}
        for cell in (cell for task in tasks for cell in row.scores.retrieval[task].cells):
            shares.setdefault((cell.depth, cell.length), []).append(cell.correct / len(cell.samples))
        grids[row.label] = [[fmean(shares.get((d, length), [math.nan])) for length in lengths] for d in depths]
    title = f"Retrieval by length and depth, {name}"
    caption = (
        "Share of answers that are exactly right, by prompt length and depth of the needle: 0 % is the start of the "
        "prompt, 100 % just before the question."
    )
    return [figure(plots.retrieval_heatmap, grids, title=title, caption=caption, lengths=lengths, depths=depths)]
