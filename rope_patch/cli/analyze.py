"""``rope-patch analyze``: parsing and printing only; what takes long to import waits."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rope_patch.cli.loading import check_device, check_dtype, items, load_model, load_tokenizer
from rope_patch.cli.options import command_line
from rope_patch.packaged import name_of

SHAPE = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "vocab_size")
LAYERS = 10_000  # more than any model has: a range is not made longer than this


def analyze(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Checkpoint or adapter: folder or hub id.", show_default=False)
    ],
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="File or folder, a domain of its own; may be repeated. Else built-in prompts in five domains."
        ),
    ] = None,
    pattern: Annotated[str, typer.Option(help="Files of a folder that are read.")] = "**/*.txt",
    layers: Annotated[str, typer.Option(help='Such as "0 3-5"; all by default.', show_default=False)] = "",
    heads: Annotated[
        str,
        typer.Option(
            help='Heads to show one by one, layer.head, "1.2 3.0"; else the clearest of each habit.', show_default=False
        ),
    ] = "",
    against: Annotated[
        str | None, typer.Option(help="Another checkpoint or adapter, read on the same text: what it does differently.")
    ] = None,
    p: Annotated[str, typer.Option(help="Values of p-RoPE's p to try; empty for none.")] = "0.9 0.75 0.5 0.25",
    tolerance: Annotated[float, typer.Option(help="Rise of perplexity that a p may cost, relative.")] = 0.01,
    tokens: Annotated[
        str, typer.Option(help="Of all rows of text together, at most; a row of each text at least.")
    ] = "16k",
    window: Annotated[
        str | None, typer.Option(help="Length of a row; by default the context, at most 2k [tokens].")
    ] = None,
    chunk: Annotated[int | None, typer.Option(help="Tokens per forward pass of the statistics; a row at once.")] = None,
    method: Annotated[str | None, typer.Option(help="Patch to apply to MODEL first, NAME:key=value+NAME….")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")] = Path("rope-patch-analysis"),
    device: Annotated[str, typer.Option(help="cpu, cuda …; auto spreads the model over what is there.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    report: Annotated[bool, typer.Option(help="Write analysis.html; needs matplotlib.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Say how the heads of a checkpoint use its rotary table: positional heads, outliers, sinks, and which p suits it.

    Writes **analysis.json**, **capture.npz**, **heads.npz** and **analysis.html**. Finished parts are kept in the
    folder: after Ctrl-C or a crash the same command goes on where it was.

    Example: **rope-patch analyze ./llama --text ./articles --text ./code -o ./analysis**
    """
    import torch
    from tqdm import tqdm
    from transformers.utils import logging as hf_logging

    from rope_patch.analysis import before_after, result
    from rope_patch.analysis import run as engine
    from rope_patch.evaluation.documents import documents
    from rope_patch.evaluation.domains import read_rows
    from rope_patch.files import folder_to_write, write_atomically
    from rope_patch.patching.locate import find_rotary
    from rope_patch.words import parse_length

    if report:
        from rope_patch.reports import analysis as page
    wanted: dict[str, Any] = {
        "layers": _layers(layers),
        "heads": list(dict.fromkeys(_head(word) for word in items(heads))),
    }
    wanted["p_values"] = list(dict.fromkeys(_share(word) for word in items(p)))
    size = parse_length(window) if window is not None else None
    total = parse_length(tokens)
    if total < 2:
        raise ValueError(f"tokens must be >= 2, got {total}")
    named = {path.name or str(path): list(documents(path, pattern=pattern)) for path in text or ()} or None
    if named is not None and len(named) < len(text or ()):
        raise ValueError("two texts have one name: rename one, domains are told apart by it")
    check_dtype(dtype)
    check_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    hf_logging.disable_progress_bar()
    sides = [(model, output), *([(against, output / "against")] if against is not None else [])]
    # What cannot be done fails before any weight is read.
    configs = [_config(source) for source, _ in sides]
    context = int(configs[0].max_position_embeddings)
    engine.check(configs[0], tolerance=tolerance, chunk=chunk, **wanted)
    shapes = [[getattr(config, name, None) for name in SHAPE] for config in configs]
    if shapes[0] != shapes[-1]:
        raise ValueError(f"{against} has other layers or heads than {model}: only one before and after can be compared")
    tokenizers = [load_tokenizer(source) for source, _ in sides]
    texts = [read_rows(words, named, window=size, tokens=total, context=context) for words in tokenizers]
    rows = texts[0]
    if not torch.equal(texts[-1].ids, rows.ids):
        raise ValueError(f"{against} reads the text as other tokens than {model}: both need one tokenizer")
    names = ["analysis.json", "capture.npz", "heads.npz"]
    with folder_to_write(output, [*names, *["analysis.html"] * report]):
        made: list[Any] = []
        for (source, folder), tokenizer in zip(sides, tokenizers, strict=True):
            loaded = load_model(source, method if folder == output else None, device, dtype)
            find_rotary(loaded)
            folder.mkdir(exist_ok=True)
            read = engine.tokens_to_read(rows, wanted["p_values"], context)
            with tqdm(total=read, unit="tok", unit_scale=True, desc=name_of(source), disable=as_json) as bar:

                def told(stage: str, done: int, bar: Any = bar) -> None:
                    bar.set_postfix_str(stage, refresh=False)
                    bar.update(done)

                try:
                    made.append(
                        engine.analyze_rows(
                            loaded,
                            tokenizer,
                            rows,
                            name=name_of(source),
                            text=named,
                            tolerance=tolerance,
                            chunk=chunk,
                            resume=folder,
                            on_progress=told,
                            **wanted,
                        )
                    )
                except KeyboardInterrupt:
                    bar.close()
                    print(
                        f"what was finished is kept in {folder}: the same command goes on from there", file=sys.stderr
                    )
                    raise
                bar.total = bar.n
            del loaded
            write_atomically(folder / "analysis.json", made[-1].to_json())
        sentences: list[str] = []
        if against is not None:
            found = before_after.differences(*made)
            sentences = before_after.changes(found, made[1].name)
            write_atomically(output / "differences.json", before_after.to_json(found, made[1].name))
            names += ["differences.json", "against/"]
        if report:
            command = command_line()
            page.write(
                output / "analysis.html", made[0], against=made[1] if against is not None else None, command=command
            )
            names.append("analysis.html")
    if as_json:
        print(made[0].to_json())
        return
    _print(made[0], result.findings(made[0]))
    for sentence in sentences:
        print(f"- {sentence}")
    print(f"wrote {', '.join(names)} in {output}")


def _config(source: str) -> Any:
    """Return the config of a checkpoint's text model, or of an adapter's base."""
    from rope_patch.checkpoints.adapters import adapter_base, is_adapter
    from rope_patch.checkpoints.save_load import load_config

    return load_config(adapter_base(source) if is_adapter(source) else source).get_text_config()


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
    found: list[int] = []
    for word in items(text):
        first, dash, last = word.partition("-")
        last = last if dash else first
        if not (_whole(first) and _whole(last)) or int(first) > int(last) or int(last) >= LAYERS:
            raise ValueError(f"layers are numbers and ranges such as '0 3-5', got {word!r}")
        found += range(int(first), int(last) + 1)
    return sorted(set(found)) or None


def _head(word: str) -> tuple[int, int]:
    """Read "3.0" as layer 3, head 0.

    >>> _head("3.0")
    (3, 0)
    """
    layer, _, head = word.partition(".")
    if not _whole(layer) or not _whole(head):
        raise ValueError(f"a head is given as layer.head, such as 3.0, got {word!r}")
    return int(layer), int(head)


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
