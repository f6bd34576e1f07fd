"""The tables that ``rope-patch kv-check`` prints."""

from __future__ import annotations

import math
import sys
from typing import Any

from rope_patch.cli.printing import new_table, show

HEAD_DIM = 128
"""Features of a head that presets are listed for."""


def print_check(checked: Any) -> None:
    """Print a table of verdicts for each length, and a summary."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from rope_patch.evaluation.answers import answers_text, shortest_of_each
    from rope_patch.evaluation.intervals import OF_PROMPTS, OF_WINDOWS
    from rope_patch.evaluation.metrics import spans_at
    from rope_patch.kv_evaluation.captions import windows_of

    console = Console(width=None if sys.stdout.isatty() else 160)
    colors = {"safe": "green", "unsafe": "red", "undecided": "yellow"}
    for method in checked.methods:
        if checked.meant(method) != method:
            console.print(escape(checked.meant(method)), soft_wrap=True)
    for length in checked.lengths:
        metrics = list(spans_at(checked.spec, length))
        title = f"{checked.model} at {length} tokens"
        table = Table(title=escape(title), box=box.SIMPLE_HEAD, title_justify="left")
        for head in ("method", "scheme"):
            table.add_column(head, overflow="fold", min_width=min(12, console.width // 10))
        table.add_column("bits", justify="right", no_wrap=True)
        for metric, span in metrics:
            # The intervals of prompts are in the files: with several tasks the table would not fit a screen.
            for head in (_head(metric, span), "change", *["interval"] * (span.task is None)):
                table.add_column(head, justify="right", no_wrap=True)
        for head in ("KL", "top-1"):
            table.add_column(head, justify="right", no_wrap=True)
        table.add_column("verdict", no_wrap=True)
        for method in checked.methods:
            base = checked.of(method)[0]
            for row in checked.of(method):
                cells = [f"{row.cache_bits[length]:.2f}"]
                for metric, span in metrics:
                    value, moved, interval = f"{metric.value(row.scores, span):.2f}", "", ""
                    if row.divergence is not None:
                        change = metric.difference(row.scores, base.scores, span, checked.limits.confidence)
                        moved, low, high = map(metric.format_change, change)
                        interval = f"{low} to {high}" if math.isfinite(change.high - change.low) else "one window"
                    cells += [value, moved, *[interval] * (span.task is None)]
                if row.divergence is None:
                    table.add_row(escape(method), "full precision", *cells, style="bold")
                    continue
                verdict = checked.verdict(row, length).kind
                word = "rounds nothing" if verdict == "undecided" and checked.idle(row, length) else verdict
                divergence = (f"{row.divergence.kl:.4f}", f"{row.divergence.top1:.1%}")
                table.add_row("", escape(row.scheme), *cells, *divergence, f"[{colors[verdict]}]{word}[/]")
            table.add_section()
        console.print(table)
    for sentence in checked.summary():
        console.print(f"- {escape(sentence)}")
    calibration = f"{checked.calibration} tokens of calibration" if checked.calibration else "no calibration"
    print(
        f"{windows_of(checked.windows, max(checked.lengths))}; {calibration}; "
        "caches simulated exactly as decoding would quantize them, not packed; bits with sinks and residual window"
    )
    print(
        "KL: mean divergence of the next token's distribution from that in full precision [nats/token]; top-1: share "
        "of tokens whose first choice is the same"
    )
    for length in checked.lengths:
        for line in checked.prompts(length):
            print(line)
    print(answers_text(shortest_of_each(checked.named_scores())))
    print(f"{OF_WINDOWS} {OF_PROMPTS}")
    for sentence in checked.warnings:
        print(f"note: {sentence}", file=sys.stderr)


def _head(metric: Any, span: Any) -> str:
    """Return the head of a metric's column: the task of retrieval, else the metric's name and its task."""
    if metric.name == "retrieval":
        return str(span.task)
    return f"{metric.name} {span.task}" if span.task else str(metric.name)


def print_presets() -> None:
    """Print the presets: text, effective bits, source."""
    from rich.markup import escape

    from rope_patch.kv_cache.schemes import FORMATS, PRESETS, Scheme, effective_bits

    table = new_table(
        *("preset", "text", f"bits at head_dim {HEAD_DIM}: keys", "values", "source"),
        caption="Parts may be added to a preset: kivi-2;sinks=4. A text is "
        "k=SIDE;v=SIDE;residual=N;flush=N;sinks=N;skip=0+27, "
        f"a side FORMAT.AXIS.SWITCH…: formats {', '.join(FORMATS)}; axes token, tokenN, channelN, tensor (fp8 alone); "
        "switches sym, pre, centre, centreall, hadamard, keep8. Bits without sinks and residual window.",
        caption_justify="left",
    )
    table.columns[1].no_wrap = True
    for name, preset in PRESETS.items():
        scheme = Scheme.parse(name)
        bits = [f"{effective_bits(side, head_dim=HEAD_DIM):.2f}" for side in (scheme.key, scheme.value)]
        table.add_row(name, escape(preset.text), *bits, escape(preset.source))
    show(table, 160)
