"""``rope-patch analyze``: parsing and printing only; what takes long to import waits."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from rope_patch.cli.analyze_reading import read_config, read_texts
from rope_patch.cli.loading import check_device, check_patch, load_model, load_tokenizer, prepare, say_smaller
from rope_patch.cli.parsing import parse
from rope_patch.cli.printing import RESULT_CACHE, command_line, resumable
from rope_patch.options.analyze import AnalyzeOptions
from rope_patch.packaged import name_of
from rope_patch.runtime import progress


def analyze(words: Sequence[str]) -> None:
    """Run ``rope-patch analyze`` with the words behind it."""
    options = parse(AnalyzeOptions, words)
    from rope_patch.analysis import run as engine
    from rope_patch.analysis.p_sweep import text_tokens
    from rope_patch.analysis.reading import AnalysisReading, tokens_in_time
    from rope_patch.evaluation.budget import default_tokens
    from rope_patch.evaluation.domains import read_rows
    from rope_patch.patching.verify import inspect_model
    from rope_patch.runtime.folders import folder_to_write

    if options.report:  # an error without matplotlib comes first
        importlib.import_module("rope_patch.reports.analysis")
    chosen = engine.Chosen(options.layers, options.heads, options.p_values, options.tolerance, options.chunk)
    patch, machine = options.patching.arguments(), options.machine
    check_patch(options.method, patch)
    texts = read_texts(options.texts, options.pattern)
    check_device(machine.device)
    prepare(machine.threads)
    # What cannot be done fails before any weight is read.
    config = read_config(options.model)
    chosen.check(config)
    context = int(config.max_position_embeddings)
    tokenizer = load_tokenizer(options.model)
    read = partial(read_rows, tokenizer, texts, window=options.window, context=context)
    rows = read(tokens=options.tokens_read or 2)
    available = text_tokens(tokenizer, texts) if options.p_values else 0
    reading = AnalysisReading(rows.ids.shape[1], options.p_values, context, available)
    output, budget = options.output, options.budget
    names = ["analysis.json", "capture.npz", "heads.npz", *["analysis.html"] * options.report]
    with folder_to_write(output, names):
        loaded = load_model(options.model, machine, options.method, **patch)
        inspect_model(loaded)  # a table that cannot be read is refused before anything is measured with it
        if budget is None:
            total = default_tokens(loaded)
        else:
            total = tokens_in_time(loaded, budget, reading.window, context, output / RESULT_CACHE)
        rows, sweep_tokens, total = reading.rows_within(read, total, options)
        say_smaller(total, "", budget)
        hidden = options.as_json
        with resumable(output), progress.bar(total, name_of(options.model), hidden=hidden):
            analysis = engine.analyze_rows(
                loaded,
                tokenizer,
                rows,
                chosen,
                name=name_of(options.model),
                text=texts,
                resume=output,
                sweep_tokens=sweep_tokens,
            )
        _show(analysis, options, names)


def _show(analysis: Any, options: AnalyzeOptions, names: Sequence[str]) -> None:
    """Write an analysis, and print it."""
    from rope_patch.analysis.result import findings
    from rope_patch.runtime.folders import write_atomically

    write_atomically(options.output / "analysis.json", analysis.to_json())
    if options.report:
        from rope_patch.reports import analysis as report
        from rope_patch.reports import page

        page.write(options.output / "analysis.html", report.page(analysis), command_line())
    if options.as_json:
        print(analysis.to_json())
        return
    _print(analysis, findings(analysis))
    print(f"wrote {', '.join(names)} in {options.output}")


def _print(analysis: Any, findings: list[str]) -> None:
    """Print the main findings, and what each p of the sweep costs."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 140)
    for sentence in findings:
        console.print(f"- {escape(sentence)}")
    if not analysis.p_sweep:
        return
    spans = [f"{low}-{high}" for low, high in itertools.pairwise(analysis.p_sweep_positions)]
    table = Table(
        title=f"p-RoPE without training on {escape(analysis.p_sweep_text)}; shares of the layers whose table changes",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    for head in ("p", "pairs zeroed", "share of logits", "by distance", *(f"ppl {span}" for span in spans)):
        table.add_column(head, justify="right")
    for point in analysis.p_sweep:
        stopped = sum(len(pairs) for pairs in point.stopped.values())
        table.add_row(
            "unchanged" if point.change is None else f"{point.p:g}",
            str(stopped),
            f"{point.logit_share:.1%}",
            f"{point.turned:.1%}",
            *(f"{value:.2f}" for value in point.perplexity),
        )
    console.print(table)
