"""``rope-patch kv-check``: parsing and printing only; what takes long to import waits."""

from __future__ import annotations

import csv
import io
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rope_patch.cli.loading import check_device, check_dtype, depth, items, load_model, load_tokenizer
from rope_patch.cli.options import command_line
from rope_patch.packaged import name_of

KEPT = "kept.jsonl"
"""Finished work, in the folder that is written."""
HEAD_DIM = 128
"""Features of a head that presets are listed for."""


def _list(asked: bool) -> None:
    if asked:
        _print_presets()
        raise typer.Exit


def kv_check(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Checkpoint or adapter: folder or hub id.", show_default=False)
    ],
    schemes: Annotated[
        str,
        typer.Option(
            help='Cache formats, presets or texts, "kivi-2 fp8 k=int4.token.pre;v=int4.token"; --list explains them.',
            show_default=False,
        ),
    ],
    lengths: Annotated[str, typer.Option(help='Prompt lengths, "4k 16k" [tokens].', show_default=False)],
    compare: Annotated[str, typer.Option(help='Methods, "default p_rope:p=0.5 yarn:factor=4".')] = "default",
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")] = Path("rope-patch-kv-check"),
    mitigations: Annotated[
        bool, typer.Option("--mitigations", help="Where a scheme is unsafe, measure changes of it that may help.")
    ] = False,
    packed: Annotated[
        str,
        typer.Option(help='Also decode with caches of transformers, for bytes and speed: "fp8 quanto-4 hqq-4".'),
    ] = "",
    tolerance: Annotated[float, typer.Option(help="Rise of perplexity that a safe scheme may cost, relative.")] = 0.02,
    windows: Annotated[
        int | None, typer.Option(help="Windows of text, as long as the longest length; 16, or as many as there are.")
    ] = None,
    task: Annotated[str, typer.Option(help="passkey, niah, multivalue, multiquery or vt.")] = "passkey",
    depths: Annotated[str, typer.Option(help="Of the needles: 0 is the start, 1 the end.")] = "0 0.25 0.5 0.75 1",
    samples: Annotated[int, typer.Option(help="Haystacks per length; each is asked at every depth.")] = 4,
    text: Annotated[Path | None, typer.Option(help="File or folder (*.txt) for perplexity; else Python's own.")] = None,
    haystack: Annotated[str, typer.Option(help="builtin, noise, or a file or folder.")] = "builtin",
    context: Annotated[
        str | None, typer.Option(help="Distances of the frequency bound; each layer's own by default [tokens].")
    ] = None,
    layer_types: Annotated[
        list[str] | None, typer.Option("--layer-type", help="Which tables are patched, on mixed models.")
    ] = None,
    chunk: Annotated[int | None, typer.Option(help="Tokens per forward pass; whole windows and prompts.")] = None,
    seed: Annotated[int, typer.Option(help="Of keys and haystacks.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda …; auto spreads the model over what is there.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    report: Annotated[bool, typer.Option(help="Write kv-check.html; needs matplotlib.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
    listed: Annotated[
        bool, typer.Option("--list", callback=_list, is_eager=True, help="Print the presets and the grammar, and stop.")
    ] = False,
) -> None:
    """Say which formats of a quantized KV cache a checkpoint survives under which tables, and what is to blame.

    Writes **kv-check.json**, **kv-check.csv** and **kv-check.html**. Caches are simulated exactly as decoding would
    quantize them, not packed. Finished work is kept in the folder: after Ctrl-C or a crash the same command goes on
    where it was.

    Presets: none, kivi-2, kivi-4, kvquant-4, int8-token, int4-token, fp8, nf4.

    Example: **rope-patch kv-check ./llama --schemes "kivi-2 int4-token fp8" --compare "default yarn:factor=4"
    --lengths "4k 16k" -o ./kv**
    """
    from dataclasses import replace

    import torch
    from tqdm import tqdm
    from transformers.utils import logging as hf_logging

    from rope_patch.evaluation.spec import EvalSpec, check_paths
    from rope_patch.files import folder_to_write, write_atomically
    from rope_patch.kv_evaluation import run as engine
    from rope_patch.kv_evaluation.verdicts import Limits
    from rope_patch.methods import as_method
    from rope_patch.words import parse_length

    if report:
        from rope_patch.reports import kv as page
    names, wanted = engine.find_schemes(items(schemes)), [as_method(name) for name in items(compare)]
    sizes, places = [parse_length(item) for item in items(lengths)], [depth(item) for item in items(depths)]
    bound = parse_length(context) if context is not None else None
    if not wanted or not sizes:
        raise ValueError("give at least one method and one length")
    spec = EvalSpec(
        sizes,
        depths=places,
        samples=samples,
        windows=windows,
        tasks=items(task),
        text=None if text is None else str(text),
        haystack=haystack,
        bucket=max(sizes),
        chunk=chunk,
        seed=seed,
    )
    limits = Limits(tolerance, context=bound)
    check_dtype(dtype)
    check_device(device)
    check_paths(spec)
    if threads is not None:
        torch.set_num_threads(threads)
    hf_logging.disable_progress_bar()
    files = ["kv-check.json", "kv-check.csv", *["kv-check.html"] * report]
    stages: set[str] = set()
    with folder_to_write(output, [*files, KEPT]):
        tokenizer, loaded = load_tokenizer(model), load_model(model, None, device, dtype)
        each = spec.tokens_to_read()
        try:
            with tqdm(total=each * len(names) * len(wanted), unit="tok", unit_scale=True, disable=as_json) as bar:

                def on_progress(stage: str, tokens: int) -> None:
                    stages.add(stage)
                    bar.total = max(bar.total, each * len(stages))  # mitigations are not known before
                    bar.set_postfix_str(stage, refresh=False)
                    bar.update(tokens)

                checked = engine.kv_check(
                    loaded,
                    tokenizer,
                    list(names),
                    spec,
                    methods=wanted,
                    limits=limits,
                    mitigate=mitigations,
                    packed=items(packed),
                    layer_types=layer_types,
                    resume=output / KEPT,
                    on_progress=on_progress,
                )
                checked = replace(checked, model=name_of(model))
                bar.total = bar.n
        except KeyboardInterrupt:
            if (output / KEPT).exists():
                print(f"what was finished is kept in {output}: the same command goes on from there", file=sys.stderr)
            raise
    # What took long is out before the page, whose failure costs nothing then.
    write_atomically(output / "kv-check.json", checked.to_json())
    write_atomically(output / "kv-check.csv", _csv(checked.table()))
    if as_json:
        print(checked.to_json(), flush=True)
    else:
        _print(checked)
    if report:
        page.write(output / "kv-check.html", checked, command=command_line())
    if not as_json:
        print(f"wrote {', '.join(files)} in {output}")


def _csv(lines: list[dict[str, Any]]) -> str:
    """Return the table for spreadsheets: indices with blanks between, nothing where there is no value."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    for line in lines:
        writer.writerow(
            {name: " ".join(map(str, value)) if isinstance(value, tuple) else value for name, value in line.items()}
        )
    return out.getvalue()


def _print(checked: Any) -> None:
    """Print what survives, a table per length, and what to do."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from rope_patch.evaluation.metrics import spans_at
    from rope_patch.kv_evaluation.captions import counted, windows_of
    from rope_patch.kv_evaluation.results import answered

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
            table.add_column(head)
        heads = [head for metric, span in metrics for head in (span.task or metric.name, "change", "interval")]
        for head in ("bits", *heads, "KL", "top-1"):
            table.add_column(head, justify="right", no_wrap=True)
        table.add_column("verdict")
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
                    cells += [value, moved, interval]
                if row.divergence is None:
                    table.add_row(escape(method), "full precision", *cells, style="bold")
                    continue
                verdict = checked.verdict(row, length).kind
                word = "rounds nothing" if verdict == "undecided" and checked.idle(row, length) else verdict
                name = f"  {row.scheme.removeprefix(row.mitigation_of)}" if row.mitigation_of else row.scheme
                divergence = (f"{row.divergence.kl:.4f}", f"{row.divergence.top1:.1%}")
                table.add_row("", escape(name), *cells, *divergence, f"[{colors[verdict]}]{word}[/]")
            table.add_section()
        console.print(table)
    for sentence in checked.summary():
        console.print(f"- {escape(sentence)}")
    for item in checked.packed:
        console.print(f"- {item}")
    calibration = f"{checked.calibration} tokens of calibration" if checked.calibration else "no calibration"
    print(
        f"{windows_of(checked.windows, max(checked.lengths))}; {calibration}; "
        "caches simulated exactly as decoding would quantize them, not packed; bits with sinks and residual window"
    )
    for length in checked.lengths:
        prompts, loss = counted(len(answered(checked.rows[0], length)), "prompt"), checked.detectable_loss(length)
        print(f"{prompts} of {length} tokens: a loss below {loss:.0%} would not be told from chance")


def _print_presets() -> None:
    """Print the presets: text, effective bits, source."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from rope_patch.kv_cache.schemes import FORMATS, PRESETS, Scheme, effective_bits

    table = Table(
        *("preset", "text", f"bits at head_dim {HEAD_DIM}: keys", "values", "source"),
        box=box.SIMPLE_HEAD,
        caption="Parts may be added to a preset: kivi-2;sinks=4. A text is k=SIDE;v=SIDE;residual=N;sinks=N;skip=0+27, "
        f"a side FORMAT.AXIS.SWITCH…: formats {', '.join(FORMATS)}; axes token, tokenN, channelN, tensorN; switches "
        "sym, pre, centre, centreall, hadamard, keep8, keep16. Bits without sinks and residual window.",
        caption_justify="left",
    )
    for name, preset in PRESETS.items():
        scheme = Scheme.parse(name)
        bits = [f"{effective_bits(side, head_dim=HEAD_DIM):.2f}" for side in (scheme.key, scheme.value)]
        table.add_row(name, escape(preset.text), *bits, escape(preset.source))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
