"""``rope-patch compare``: parsing and printing only."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rope_patch.cli.loading import check_device, check_dtype, depth, items, load_model, load_tokenizer
from rope_patch.cli.options import KEPT, Json, Model, command_line
from rope_patch.packaged import name_of


def compare(
    model: Model,
    methods: Annotated[str, typer.Option(help='Such as "default yarn:factor=4 p_rope:p=0.5".', show_default=False)],
    lengths: Annotated[str, typer.Option(help='Prompt lengths, "4k 16k 32k" [tokens].', show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")] = Path("rope-patch-compare"),
    adapter: Annotated[str | None, typer.Option(help="PEFT adapter to measure under every method.")] = None,
    task: Annotated[str, typer.Option(help="passkey, niah, multivalue, multiquery, vt, or several.")] = "passkey",
    mode: Annotated[
        str, typer.Option(help="single (a needle per prompt) or multikey (one at every depth).")
    ] = "single",
    depths: Annotated[str, typer.Option(help="Of the needles: 0 is the start, 1 the end.")] = "0 0.25 0.5 0.75 1",
    samples: Annotated[int, typer.Option(help="Haystacks per length; each is asked at every depth.")] = 4,
    windows: Annotated[
        int | None, typer.Option(help="Windows of text, as long as the longest length; 16, or as many as there are.")
    ] = None,
    bucket: Annotated[int | None, typer.Option(help="Width of the perplexity curve's points [tokens].")] = None,
    text: Annotated[Path | None, typer.Option(help="File or folder (*.txt) for perplexity; else Python's own.")] = None,
    haystack: Annotated[str, typer.Option(help="builtin, noise, or a file or folder.")] = "builtin",
    layer_types: Annotated[
        list[str] | None, typer.Option("--layer-type", help="Which tables, on mixed models; may be repeated.")
    ] = None,
    freeze_at: Annotated[int | None, typer.Option(help="Length at which to freeze a dynamic table [tokens].")] = None,
    chunk: Annotated[
        int | None, typer.Option(help="Tokens per forward pass: bounds memory to the KV cache and little more.")
    ] = None,
    batch_tokens: Annotated[int, typer.Option(help="Tokens read side by side, at most.")] = 16384,
    device: Annotated[str, typer.Option(help="cpu, cuda …; auto spreads the model over what is there.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of keys and haystacks.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    report: Annotated[bool, typer.Option(help="Write report.html; needs matplotlib.")] = True,
    as_json: Json = False,
) -> None:
    """Measure methods on one model: perplexity by position and retrieval, same texts and prompts for all.

    Writes **comparison.json** and **report.html**. Finished work is kept in the folder: after Ctrl-C or a crash the
    same command goes on where it was.

    Example: **rope-patch compare ./llama --methods "default yarn:factor=4" --lengths "4k 16k" -o ./compared**
    """
    from dataclasses import replace

    import torch
    from tqdm import tqdm
    from transformers.utils import logging as hf_logging

    from rope_patch import checkpoints
    from rope_patch.checkpoints.adapters import is_adapter
    from rope_patch.errors import blamed_on
    from rope_patch.evaluation import compare as engine
    from rope_patch.evaluation.spec import EvalSpec, check_paths
    from rope_patch.files import folder_to_write, write_atomically
    from rope_patch.methods import as_method
    from rope_patch.words import parse_length

    if report:
        from rope_patch.reports import comparison as page
    wanted = [as_method(name) for name in items(methods)]
    sizes, places = [parse_length(item) for item in items(lengths)], [depth(item) for item in items(depths)]
    check_dtype(dtype)
    check_device(device)
    if not wanted or not sizes:
        raise ValueError("give at least one method and one length")
    spec = EvalSpec(
        sizes,
        depths=places,
        samples=samples,
        windows=windows,
        tasks=items(task),
        mode=mode,
        text=None if text is None else str(text),
        haystack=haystack,
        bucket=bucket,
        chunk=chunk,
        batch_tokens=batch_tokens,
        seed=seed,
    )
    check_paths(spec)
    if adapter is not None and not Path(adapter).exists() and adapter.count("/") != 1:
        raise FileNotFoundError(f"no adapter folder {adapter!r}")
    if adapter is not None and is_adapter(model):
        raise ValueError(f"{model} is an adapter itself: give its base as MODEL to measure another one on it")
    if threads is not None:
        torch.set_num_threads(threads)
    hf_logging.disable_progress_bar()
    with folder_to_write(output, ["comparison.json", KEPT, *["report.html"] * report]):
        tokenizer, loaded = load_tokenizer(model), load_model(model, None, device, dtype)
        notes: dict[str, str] = {}
        if is_adapter(model):
            notes["adapter"] = name_of(model)
        if adapter is not None:
            from peft import PeftModel

            record = checkpoints.read_record(adapter)
            trained = f"trained under {record.to_method()}" if record else "no patch recorded beside it"
            notes["adapter"] = f"{Path(adapter).name} ({trained})"
            print(f"adapter {notes['adapter']}: measured under every method", file=sys.stderr)
            with blamed_on(f"{adapter}: PEFT cannot load this adapter onto {type(loaded).__name__}"):
                loaded = PeftModel.from_pretrained(loaded, adapter)
        total = len(wanted) * spec.tokens_to_read()
        try:
            with tqdm(total=total, unit="tok", unit_scale=True, desc=task, disable=as_json) as bar:

                def on_progress(method: str, tokens: int) -> None:
                    bar.set_postfix_str(method, refresh=False)
                    bar.update(tokens)

                comparison = engine.compare(
                    loaded.eval(),
                    tokenizer,
                    wanted,
                    spec,
                    layer_types=layer_types,
                    freeze_at=freeze_at,
                    resume=output / KEPT,
                    on_progress=on_progress,
                )
        except KeyboardInterrupt:
            if (output / KEPT).exists():
                print(f"what was finished is kept in {output}: the same command goes on from there", file=sys.stderr)
            raise
    comparison = replace(comparison, environment=comparison.environment | notes)
    write_atomically(output / "comparison.json", comparison.to_json())
    if report:
        page.write(output / "report.html", [comparison], command=command_line())
    if as_json:
        print(comparison.to_json())
        return
    print_table(comparison)
    print(f"wrote {output / 'comparison.json'}" + (f" and {output / 'report.html'}" if report else ""))


def print_table(comparison: Any) -> None:
    """Print the scores of every method, those that lead beyond doubt in green with a star."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from rope_patch.evaluation.metrics import METRICS

    columns = comparison.columns()
    heads = [column.heading for column in columns]
    title = escape(f"{comparison.model}, trained at {comparison.trained_length} tokens")
    table = Table("method", *heads, title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for i, row in enumerate(comparison.rows):
        cells = []
        for column in columns:
            value = METRICS[column.metric].format(column.values[i])
            cells.append(f"[bold green]{value}*[/]" if column.winner == row.method else value)
        table.add_row(row.method, *cells)
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    if any(column.winner for column in columns):
        print("* ahead of every other method: the paired 95 % intervals of all differences exclude zero")
