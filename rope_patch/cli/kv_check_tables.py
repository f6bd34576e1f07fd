"""The tables that ``rope-patch kv-check`` prints."""

from __future__ import annotations

import math
import sys
from typing import Any

from rope_patch.cli.printing import new_table, show

HEAD_DIM = 128
"""The number of features of a head for which the bits of presets are listed."""


def print_check(checked: Any) -> None:
    """Print a table of verdicts for each length, and a summary."""
    from rope_patch.evaluation.intervals import INTERVAL_OVER_PROMPTS, INTERVAL_OVER_WINDOWS
    from rope_patch.evaluation.number_format import percent
    from rope_patch.evaluation.shown_answers import answers_text, shortest_of_each
    from rope_patch.kv_evaluation.verdicts import NOISE
    from rope_patch.runtime.captions import windows_text

    for method in checked.methods:
        if checked.meant(method) != method:
            print(checked.meant(method))
    for length in checked.lengths:
        _print_length(checked, length)
    for sentence in checked.summary():
        print(f"- {sentence}")
    print(
        f"{windows_text(checked.windows, max(checked.lengths))}; "
        "caches simulated exactly as decoding would quantize them, not packed; bits with sinks and residual window"
    )
    print(
        "KL: mean divergence of the next token's distribution from that in full precision [nats/token]; same top: "
        "share of tokens whose first choice stays"
    )
    limit = checked.limits.loss
    print(
        f"unsafe, whatever the interval: KL above {limit:.4f}, or perplexity changed by more than "
        f"{percent(limit + NOISE)}, which no noise explains"
    )
    for length in checked.lengths:
        for line in checked.prompts(length):
            print(line)
    for line in answers_text(shortest_of_each(checked.named_scores())):
        print(line)
    print(f"{INTERVAL_OVER_WINDOWS} {INTERVAL_OVER_PROMPTS}")
    for sentence in checked.warnings:
        print(f"note: {sentence}", file=sys.stderr)


def _print_length(checked: Any, length: int) -> None:
    """Print the table of all methods and formats at one length."""
    from rich.markup import escape

    from rope_patch.evaluation.metrics import change_text, spans_at

    colors = {"safe": "green", "unsafe": "red", "undecided": "yellow"}
    metrics, heads = list(spans_at(checked.spec, length)), ["bits", "KL", "same top"]
    for metric, span in metrics:
        name = str(span.task) if metric.name == "retrieval" else f"{metric.name} {span.task or ''}".strip()
        # Intervals of prompts are only in the files: with several tasks the table would not fit on a screen.
        heads += [name, "change", *(["interval"] if span.task is None else [])]
    title = f"{checked.model} at {length} tokens"
    table = new_table("method", "format", *heads, "verdict", title=title, right=heads)
    for row in checked.rows:
        cells, full = [f"{row.cache_bits[length]:.2f}", "", ""], row.divergence is None
        if row.divergence is not None:
            cells[1:] = f"{row.divergences[length].kl:.4f}", f"{row.divergences[length].top1:.1%}"
        for metric, span in metrics:
            change = checked.change(row, metric, span)
            moved, low, high = (change_text(metric, value) for value in change)
            interval = f"{low} to {high}" if math.isfinite(change.high - change.low) else "one window"
            differences = [moved, *([interval] if span.task is None else [])]
            cells += [f"{metric.value(row.scores, span):.2f}", *([""] * len(differences) if full else differences)]
        if full:
            if table.rows:
                table.add_section()
            table.add_row(escape(row.method), "full precision", *cells, style="bold")
            continue
        verdict = checked.verdict(row, length)
        word = "rounds nothing" if verdict.idle else verdict.kind
        table.add_row("", escape(row.format), *cells, f"[{colors[verdict.kind]}]{word}[/]")
    show(table, 160)


def print_presets() -> None:
    """Print the cache formats with source, bits and what they were compared with, and the number formats of texts."""
    from rich.markup import escape

    from rope_patch.kv_cache.formats import FORMATS
    from rope_patch.kv_cache.schemes import PRESETS, SWITCHES, Scheme, effective_bits

    table = new_table("format", "bits", "source, and as a text", "compared with")
    table.columns[2].min_width = 70  # so that no text is broken into two lines
    for name, preset in PRESETS.items():
        scheme = Scheme.parse(name)
        bits = ", ".join(f"{effective_bits(side, HEAD_DIM):.2f}" for side in (scheme.key, scheme.value))
        table.add_row(name, bits, escape(f"{preset.source}\n{preset.text}"), escape(preset.compared))
    show(table, 160)
    table = new_table(
        *("number format", "bits of an element", "what it is"),
        caption="Parts may be added to a format: kivi-2;sinks=4. A text is "
        "k=SIDE;v=SIDE;residual=N;flush=N;sinks=N;skip=0+27, a side FORMAT.AXIS.SWITCH…: axes token, tokenN, channelN; "
        f"switches {', '.join(SWITCHES)}. Bits are those of keys and values, heads of {HEAD_DIM} "
        "features, without sinks and residual window.",
        caption_justify="left",
    )
    for name, form in FORMATS.items():
        table.add_row(name, f"{form.bits:g}", escape((form.__doc__ or "").partition("\n")[0]))
    show(table, 160)
