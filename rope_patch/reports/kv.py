"""The page of ``rope-patch kv-check``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rope_patch.evaluation.metrics import (
    SAFE_LOST_SHARE,
    Metric,
    Span,
    change_text,
    column_heading,
    spans_at,
    value_text,
)
from rope_patch.evaluation.number_format import number_text, percent, relative
from rope_patch.frequencies import wavelength
from rope_patch.kv_cache.schemes import PRESETS, Scheme
from rope_patch.kv_evaluation.check_setting import ERROR_TOKENS
from rope_patch.kv_evaluation.results import KVCheck
from rope_patch.kv_evaluation.verdicts import NOISE, CheckRow
from rope_patch.reports import page as pages
from rope_patch.reports.comparison import answers, examples, retrieval_facts
from rope_patch.reports.layer_kinds import Kind, kinds
from rope_patch.reports.page import (
    INTERVALS,
    Cell,
    Cells,
    DataTable,
    Figure,
    Note,
    Page,
    Part,
    Section,
    figure,
    short_names,
)
from rope_patch.reports.plots import kv as plots
from rope_patch.runtime.captions import ranges_text, windows_text


def page(check: KVCheck) -> Page:
    """Return a check as a page.

    Args:
        check: the check of a checkpoint.
    """
    return Page(f"Quantized caches: {check.model}", [_results(check), _attribution(check), _how(check)])


# --- what survives ---------------------------------------------------------------------------------------------------


def _results(check: KVCheck) -> Section:
    parts: list[Part] = [
        *(Note(f"Note: {sentence}.") for sentence in check.warnings),
        *(Note(check.meant(method)) for method in check.methods if check.meant(method) != method),
        *(_table(check, length) for length in check.lengths),
        *examples(check.named_scores()),
        *(_costs(check, metric, span) for metric, span in spans_at(check.spec, max(check.lengths))),
        *answers(check.named_scores()),
        _formats(check),
    ]
    return Section("What survives", check.summary(), parts)


def _table(check: KVCheck, length: int) -> DataTable:
    metrics = list(spans_at(check.spec, length))
    heads = [head for metric, span in metrics for head in (column_heading(metric, span), "Change")]
    columns = ("Format", "Verdict", "Bits", "KL [nats/token]", "Same top token", *heads)
    rows: list[Cells] = []
    for method in check.methods:
        for row in check.of(method):
            values = [value_text(metric, metric.value(row.scores, span)) for metric, span in metrics]
            if row.divergence is None:
                changes = [cell for value in values for cell in (value, "–")]
                rows.append([f"{method}: full precision", Cell("", style="left"), "16", "–", "–", *changes])
                continue
            divergence = row.divergences[length]
            columns_of_kl = f"{number_text(divergence.kl, 4)}", f"{number_text(100 * divergence.top1, 1)} %"
            cells: Cells = [_verdict(check, row, length), _bits(row, length), *columns_of_kl]
            for value, (metric, span) in zip(values, metrics, strict=True):
                cells += [value, _change(check, row, metric, span)]
            rows.append([row.format, *cells])
    limits = check.limits
    prompts = "".join(f" {sentence}." for sentence in check.prompts(length))
    caption = (
        f"Safe: the {100 * limits.confidence:g} % interval of the change of perplexity lies within "
        f"{100 * limits.tolerance:g} %, at most {100 * SAFE_LOST_SHARE:g} % of the prompts are lost, and KL is at most "
        f"{limits.loss:.4f}; unsafe: KL is larger, an interval shows that one of the others is exceeded, or the change "
        f"exceeds the tolerance by {NOISE:g} nats/token, which no noise explains. Below the bits of a cache stand "
        f"those of its quantized part, where they differ.{prompts} {INTERVALS}"
    )
    return DataTable(f"{length} tokens", columns, rows, caption)


def _change(check: KVCheck, row: CheckRow, metric: Metric, span: Span) -> Cell:
    """Return a change from full precision; below it stands its interval, where there is one."""
    change = check.change(row, metric, span)
    estimate, low, high = (change_text(metric, value) for value in change)
    if math.isfinite(change.high - change.low):
        return Cell(estimate, f"{low} to {high}")
    return Cell(estimate)


def _verdict(check: KVCheck, row: CheckRow, length: int) -> Cell:
    verdict = check.verdict(row, length)
    return Cell("rounds nothing" if verdict.idle else verdict.kind, style=verdict.kind)


def _bits(row: CheckRow, length: int) -> Cell:
    """Return the bits of a cache; below them stand those of its quantized part, where they differ."""
    whole = number_text(row.cache_bits[length])
    part = number_text(row.bits)
    if part == whole:
        return Cell(whole)
    return Cell(whole, part)


def _costs(check: KVCheck, metric: Metric, span: Span) -> Figure:
    """Return the figure of what each format costs in one metric at the longest length."""
    names = _formats_of(check)
    panels = {}
    for method, name in _methods(check).items():
        base, *rows = check.of(method)
        costs = [plots.Cost("full precision", base.cache_bits[span.stop], 0.0, 0.0, 0.0, "")]
        for row in rows:
            value, low, high = check.change(row, metric, span)
            if metric.is_perplexity:
                value, low, high = (100 * relative(end) for end in (value, low, high))
            verdict = check.verdict(row, span.stop).kind
            costs.append(plots.Cost(names[row.format], row.cache_bits[span.stop], value, low, high, verdict))
        panels[name] = costs
    better = "lower" if metric.lower_is_better else "higher"
    caption = f"Change from full precision with its interval; {better} is better."
    xlabel = f"change of {span.task or metric.name}, {metric.unit}"
    limit = None
    if metric.is_perplexity:
        xlabel = f"change of {metric.name} [%], linear within ±1 %"
        limit = 100 * check.limits.tolerance
        caption += " Dotted: what is tolerated."
    return figure(
        plots.costs,
        panels,
        title=f"What formats cost in {span.task or metric.name} at {span.stop} tokens",
        caption=caption,
        xlabel=xlabel,
        logarithmic=metric.lower_is_better,
        limit=limit,
    )


def _formats(check: KVCheck) -> DataTable:
    # Reversed twice, the first row of each format stays, and so does their order.
    first = {row.format: row for row in reversed(check.rows) if row.divergence is not None}
    rows: list[Cells] = []
    for name, row in reversed(first.items()):
        preset = PRESETS.get(name)
        scheme = Scheme.parse(row.format_text)
        residual = Cell(str(scheme.residual))
        if scheme.flush:
            residual = Cell(str(scheme.residual), f"flush {scheme.flush}")
        source = Cell(preset.source if preset else "given as a text", style="text")
        bits = number_text(row.key_bits), number_text(row.value_bits)
        rows.append([name, Cell(row.format_text, style="text"), *bits, residual, str(scheme.sinks), source])
    caption = (
        "Effective bits per element of the quantized part, 16-bit scales and zero points included. The text of a "
        "format is explained in docs/kv-caches.md."
    )
    columns = ("Format", "Text", "Bits of keys", "of values", "Residual [tokens]", "Sinks [tokens]", "Source")
    return DataTable("What the formats mean", columns, rows, caption, folded=True)


# --- where the cost comes from ---------------------------------------------------------------------------------------


def _attribution(check: KVCheck) -> Section:
    rows: list[Cells] = []
    for row in _quantized(check):
        line = _attribution_row(check, row)
        if line is not None:
            rows.append(line)
    if not rows:
        answer = "No format is unsafe: there is nothing to attribute."
        return Section("Where the cost comes from", [answer], [_by_wavelength(check)])
    caption = (
        "Layers that cost most when they alone are quantized, and pairs of their keys that lower the cost if left in "
        "full precision: long ones, which stretch the scale of a token, or those that carry half of the logit error."
    )
    columns = ("Format", "Method", "Lengths [tokens]", "Layers", "Pairs", "Why")
    table = DataTable("Unsafe formats", columns, rows, caption)
    unsafe = len({row[0] for row in rows})  # a format may be unsafe under several methods
    answer = f"{unsafe} formats are unsafe."
    if unsafe == 1:
        answer = "1 format is unsafe."
    return Section("Where the cost comes from", [answer], [table, _by_wavelength(check)])


def _attribution_row(check: KVCheck, row: CheckRow) -> Cells | None:
    lengths = [str(length) for length in check.lengths if check.verdict(row, length).kind == "unsafe"]
    if not lengths or row.attribution is None:
        return None
    attribution = row.attribution
    why = f"keys alone cost {percent(attribution.keys)}, values alone {percent(attribution.values)}"
    if attribution.left is not None:
        why += f"; the whole format {percent(attribution.whole)}"
        why += f", and {percent(attribution.left)} with these pairs in full precision"
    texts = (row.method, ", ".join(lengths), ranges_text(attribution.worst), ranges_text(attribution.pairs) or "–", why)
    return [row.format, *(Cell(text, style="text") for text in texts)]


def _by_wavelength(check: KVCheck) -> Figure | Note:
    """Return the figure of what each pair adds to the error of the logits, or a note where no key is rounded."""
    names = _formats_of(check)
    panels: dict[str, plots.Waves] = {}
    worst = []
    for method, name in _methods(check).items():
        rows = [row for row in _quantized(check) if row.method == method]
        for kind in kinds(check.captures[method]):
            errors = {names[row.format]: _pair_errors(row, kind) for row in rows}
            label = name
            if kind.name:
                label += f": {kind.name}"
            panels[label] = plots.Waves(wavelength(kind.inv_freq.double()), errors, kind.context)
            for format_name, error in errors.items():
                if float(error.max()) > 0:
                    worst.append(f"{label}, {format_name}: pair {int(error.argmax())}")
    if not worst:
        tokens = min(ERROR_TOKENS, max(check.lengths))
        return Note(f"No key is rounded at {tokens} tokens: there is no error of pairs to draw.")
    caption = (
        "Root mean square over heads, layers and queries of what rounding a pair of the keys adds to a logit. The "
        f"pair with the largest: {'; '.join(worst)}."
    )
    title = "Which pairs carry the error"
    return figure(plots.errors_by_wavelength, panels, list(names.values()), title=title, caption=caption)


def _pair_errors(row: CheckRow, kind: Kind) -> Tensor:
    """Root mean square error of each pair over heads and layers of a kind: (pairs,)."""
    indices = {layer.index for layer in kind.layers}
    parts = [error.pair for error in row.errors if error.layer in indices]
    if not parts:
        return torch.zeros(len(kind.inv_freq), dtype=torch.float64)
    return torch.cat(parts).square().mean(0).sqrt()


# --- how it was measured ---------------------------------------------------------------------------------------------


def _how(check: KVCheck) -> Section:
    answer = (
        f"{windows_text(check.windows, check.spec.longest)}. Formats are simulated, not packed: keys and values are "
        "rounded exactly as decoding would round them. Memory is computed from bits, and no time is measured."
    )
    note = (
        "Scales and zero points are float32, except in formats of programs that store them in 16 bits. In half "
        "precision, differences of about 1e-4 nats/token (KL) are noise: full precision is read by the model’s own "
        "attention, a format by this package’s."
    )
    return Section("How it was measured", [answer], [Note(note), pages.facts(_facts(check), check.environment)])


def _facts(check: KVCheck) -> list[tuple[str, str]]:
    """What was measured, on what, and with what."""
    spec = check.spec
    scores = check.rows[0].scores
    chunk = "in one pass"
    if spec.chunk is not None and spec.chunk < spec.longest:
        chunk = f"in passes of {spec.chunk} tokens"
    tokens = scores.perplexity.tokens if scores.perplexity else 0
    tables = [f"{method}: {kind} {mark}" for method, own in check.tables.items() for kind, mark in own.items()]
    return [
        ("Model", check.model),
        ("Methods", ", ".join(check.meant(method) for method in check.methods)),
        ("Tables", "; ".join(tables)),
        ("Text", f"{check.text}; SHA-256 {check.digest[:16]}…"),
        ("Perplexity", f"{windows_text(check.windows, spec.longest)}, read {chunk}; {tokens} tokens scored"),
        *retrieval_facts(scores),
    ]


def _quantized(check: KVCheck) -> list[CheckRow]:
    return [row for method in check.methods for row in check.of(method)[1:]]


def _formats_of(check: KVCheck) -> dict[str, str]:
    """The formats, and a name of each that fits a figure."""
    names = list(dict.fromkeys(row.format for row in _quantized(check)))
    return dict(zip(names, short_names(names), strict=True))


def _methods(check: KVCheck) -> dict[str, str]:
    """The methods, and a name of each that fits a figure."""
    return dict(zip(check.methods, short_names(check.methods), strict=True))
