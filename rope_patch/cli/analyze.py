"""``rope-patch analyze``: parsing and printing only; what takes long to import waits."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from rope_patch.cli.analyze_reading import plan_reading, read_config, read_texts
from rope_patch.cli.loading import (
    AIM,
    check_device,
    check_dtype,
    check_patch,
    load_model,
    load_tokenizer,
    prepare,
    progress_bar,
)
from rope_patch.cli.options import (
    RESULT_CACHE,
    Budget,
    Chunk,
    Device,
    Dtype,
    FreezeAt,
    Import,
    Json,
    LayerTypes,
    Method,
    Model,
    Output,
    Report,
    TargetLength,
    Threads,
    chosen,
    command_line,
    items,
    list_of,
    resumable,
    tokens,
    value_of,
)
from rope_patch.options.shared import Machine
from rope_patch.packaged import name_of

LAYERS = 10_000  # more than any model has: a range is not made longer than this


def _whole(word: str) -> bool:
    return word.isascii() and word.isdigit()


def _share(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"p is a number in (0, 1), got {word!r}") from None


def _layers(text: str) -> list[int] | None:
    """Read "0 3-5" as 0, 3, 4, 5; None for nothing.

    >>> _layers("0 3-5"), _layers("")
    ([0, 3, 4, 5], None)
    """
    indices: list[int] = []
    for word in items(text):
        first, dash, last = word.partition("-")
        last = last if dash else first
        if not (_whole(first) and _whole(last)) or int(first) > int(last) or int(last) >= LAYERS:
            raise ValueError(f"layers are numbers and ranges such as '0 3-5', got {word!r}")
        indices += range(int(first), int(last) + 1)
    return sorted(set(indices)) or None


def _head(word: str) -> tuple[int, int]:
    """Read "3.0" as layer 3, head 0.

    >>> _head("3.0")
    (3, 0)
    """
    layer, _, head = word.partition(".")
    if not _whole(layer) or not _whole(head):
        raise ValueError(f"a head is given as layer.head, such as 3.0, got {word!r}")
    return int(layer), int(head)


# Longer than a screen: the signature is the options, each with its help, and the docstring is the help of the command.
def analyze(
    command: typer.Context,
    model: Model,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text",
            metavar="PATH",
            help="A text file, or a folder of text files, to run the model on. Repeat it for more; results are given "
            "for each. By default short built-in texts of five kinds.",
            show_default=False,
        ),
    ] = None,
    pattern: Annotated[str, typer.Option(metavar="GLOB", help="Which files of a --text folder are read.")] = "**/*.txt",
    layers: Annotated[
        Sequence[int] | None,
        typer.Option(
            parser=value_of("--layers", _layers),
            metavar="LAYERS",
            help='The layers to analyze, for example "0 3-5". By default all of them.',
            show_default=False,
        ),
    ] = None,
    heads: Annotated[
        Sequence[tuple[int, int]],
        typer.Option(
            parser=list_of("--heads", _head),
            metavar="HEADS",
            help='The attention heads to show in detail, as layer.head, for example "1.2 3.0". By default the clearest '
            "example of each type.",
            show_default=False,
        ),
    ] = (),
    p: Annotated[
        Sequence[float],
        typer.Option(
            parser=list_of("--p", _share),
            metavar="VALUES",
            help='The values of p to try p-RoPE with, separated by spaces. "" tries none.',
        ),
    ] = (0.9, 0.75, 0.5, 0.25),
    tolerance: Annotated[
        float,
        typer.Option(metavar="SHARE", help="The relative increase in perplexity up to which a p is recommended."),
    ] = 0.01,
    tokens_read: Annotated[
        int | None,
        tokens(
            "--tokens",
            "How much text the statistics read; at least one row of each text is. By default 16k, or less for a large "
            "model.",
            show_default=False,
        ),
    ] = None,
    budget: Budget = None,
    window: Annotated[
        int | None,
        tokens(
            "--window",
            "The length of the rows that the text is cut into. By default the context length of the model, but at "
            "most 2k.",
            show_default=False,
        ),
    ] = None,
    chunk: Chunk = None,
    method: Method = None,
    target_length: TargetLength = None,
    layer_types: LayerTypes = None,
    freeze_at: FreezeAt = None,
    output: Output = Path("rope-patch-analysis"),
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
    report: Report = True,
    imports: Import = None,
    as_json: Json = False,
) -> None:
    """Analyze how the attention heads of a model use its rotary table, and which p of p-RoPE would suit it.

    It finds positional heads, features with outliers, and attention sinks. It writes **analysis.json**,
    **capture.npz**, **heads.npz** and **analysis.html**. If it is interrupted, run it again to continue: finished work
    is saved in the output folder.

    Example: **rope-patch analyze ./llama --text ./articles --text ./code -o ./analysis**
    """
    from rope_patch.analysis import run as engine
    from rope_patch.analysis.p_sweep import text_tokens
    from rope_patch.analysis.reading import AnalysisReading, tokens_in_time
    from rope_patch.analysis.result import findings
    from rope_patch.evaluation.budget import default_tokens
    from rope_patch.evaluation.domains import read_rows
    from rope_patch.files import folder_to_write, write_atomically
    from rope_patch.patching.verify import inspect_model

    if report:
        from rope_patch.reports import analysis as page
    if tokens_read is not None and tokens_read < 2:
        raise ValueError(f"tokens must be >= 2, got {tokens_read}")
    options: dict[str, Any] = {
        "layers": layers,
        "heads": list(dict.fromkeys(heads)),
        "p_values": list(dict.fromkeys(p)),
    }
    options |= {"tolerance": tolerance, "chunk": chunk}
    patch: dict[str, Any] = {"target_length": target_length, "layer_types": layer_types, "freeze_at": freeze_at}
    check_patch(method, patch)
    texts = read_texts(text, pattern)
    check_dtype(dtype)
    check_device(device)
    prepare(threads)
    # What cannot be done fails before any weight is read.
    config = read_config(model)
    engine.check(config, **options)
    context = int(config.max_position_embeddings)
    tokenizer = load_tokenizer(model)
    read = partial(read_rows, tokenizer, texts, window=window, context=context)
    rows = read(tokens=tokens_read or 2)
    available = text_tokens(tokenizer, texts) if options["p_values"] else 0
    reading = AnalysisReading(rows.ids.shape[1], options["p_values"], context, available)
    names = ["analysis.json", "capture.npz", "heads.npz"]
    with folder_to_write(output, [*names, *["analysis.html"] * report]):
        loaded = load_model(model, Machine(device, dtype), method, **patch)
        inspect_model(loaded)  # a table that cannot be read is refused before anything is measured with it
        if budget is None:
            total = default_tokens(loaded)
        else:
            total = tokens_in_time(loaded, budget, reading.window, context, output / RESULT_CACHE)
        rows, sweep_tokens, reading = plan_reading(
            read, reading, chosen(command), tokens_read, total, budget is not None
        )
        total = reading.tokens(rows.ids.numel(), sweep_tokens)
        print(f"reads {total:,} tokens{AIM if budget is None else ''}", file=sys.stderr)
        with resumable(output), progress_bar(total, name_of(model), hidden=as_json) as (bar, on_progress):
            analysis = engine.analyze_rows(
                loaded,
                tokenizer,
                rows,
                name=name_of(model),
                text=texts,
                resume=output,
                on_progress=on_progress,
                sweep_tokens=sweep_tokens,
                **options,
            )
            bar.total = bar.n
        write_atomically(output / "analysis.json", analysis.to_json())
        if report:
            page.write(output / "analysis.html", analysis, command=command_line())
            names.append("analysis.html")
    if as_json:
        print(analysis.to_json())
        return
    _print(analysis, findings(analysis))
    print(f"wrote {', '.join(names)} in {output}")


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
