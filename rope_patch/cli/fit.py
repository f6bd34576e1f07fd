"""``rope-patch fit``: parsing and printing only; what takes long to import waits."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from rope_patch.cli.loading import check_device, check_dtype, check_source, depth, items, load_model, load_tokenizer
from rope_patch.cli.options import command_line

NOTE = "fit.json"


def fit(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint: folder or hub id.", show_default=False)],
    length: Annotated[str, typer.Option(help="Target length, such as 8k [tokens].", show_default=False)],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder to write the patched checkpoint to.", show_default=False)
    ],
    data: Annotated[
        Path | None, typer.Option(help="File or folder (*.txt) to fit to; its last tenth decides. Else Python's own.")
    ] = None,
    init: Annotated[
        str | None, typer.Option(help='Tables to start from, "yarn abf:factor=50"; all are fitted. yarn by default.')
    ] = None,
    family: Annotated[
        str | None, typer.Option(help="Scan the parameters of a method instead, without gradients: p_rope.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Of Adam; 0 judges the starts alone. 40 by default.")] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Of a step; two rows of the target, 4096 at least [tokens].")
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="On the logarithms of the frequencies; it falls to 0.")] = 0.04,
    retrieval: Annotated[float, typer.Option(help="Share of the learning rate for answers; 0 for text alone.")] = 0.8,
    task: Annotated[str, typer.Option(help="passkey, niah, multivalue, multiquery or vt.")] = "passkey",
    checks: Annotated[int, typer.Option(help="How often the table is judged, and turned back if worse.")] = 2,
    patience: Annotated[int, typer.Option(help="Checks without a better held-out loss before a stop.")] = 2,
    windows: Annotated[int, typer.Option(help="Of held-out text, as long as the target.")] = 8,
    depths: Annotated[str, typer.Option(help="Of the needles of held-out prompts.")] = "0 0.25 0.5 0.75 1",
    samples: Annotated[int, typer.Option(help="Haystacks per length; each is asked at every depth.")] = 4,
    band: Annotated[float | None, typer.Option(help="Factor by which no frequency leaves its start.")] = None,
    monotone: Annotated[bool, typer.Option("--monotone", help="No pair overtakes a faster one.")] = False,
    curve: Annotated[int | None, typer.Option(help="Cosines that the factors follow; a factor per pair else.")] = None,
    scaling: Annotated[bool, typer.Option(help="Fit the factor on cos and sin, too.")] = False,
    layer_types: Annotated[
        list[str] | None, typer.Option("--layer-type", help="Which tables, on mixed models; may be repeated.")
    ] = None,
    freeze_at: Annotated[int | None, typer.Option(help="Length at which to freeze a dynamic table [tokens].")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace an earlier patch.")] = False,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Compute activations again in the backward pass, for memory.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of rows and prompts.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda …; auto spreads the model over what is there.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that holds files.")] = False,
    figure: Annotated[bool, typer.Option(help="Write fit.svg; needs matplotlib.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Fit the rotary table of a checkpoint to a longer context, its weights frozen, and write a patched copy.

    Rows of text of many lengths are learned, and passkeys hidden in such rows; the table that is kept is chosen on
    held-out text and prompts, reads no worse there than its start and finds not surely less. The copy loads in plain
    transformers. Beside it: **fit.json**, what was measured, and **fit.svg**, the table among others. Finished work is
    kept in **OUTPUT.fit.jsonl** until the end: after Ctrl-C or a crash the same command goes on where it was.

    Example: **rope-patch fit ./llama --length 8k --data ./books -o ./llama-8k**
    """
    import torch
    from tqdm import tqdm
    from transformers.utils import logging as hf_logging

    from rope_patch import fitting
    from rope_patch.checkpoints.adapters import is_adapter
    from rope_patch.checkpoints.offline import check_free, patch_folder
    from rope_patch.evaluation.compare import environment
    from rope_patch.files import claimed, write_atomically
    from rope_patch.words import parse_length

    if figure:
        from rope_patch.plots import base as plots
    check_dtype(dtype)
    check_device(device)
    check_source(model)
    if is_adapter(model):
        raise ValueError(f"{model} is an adapter: merge it into its base first, and fit that")
    if Path(model).is_dir() and output.exists() and output.samefile(model):
        raise ValueError(f"{output} is the checkpoint itself: give another output folder")
    if output.exists() and not output.is_dir():
        raise FileExistsError(f"{str(output)!r} is a file: give a folder to write")
    place = Path(os.path.abspath(output))  # "." has no name
    work, command = place.with_name(f"{place.name}.fit.jsonl"), command_line()
    overwrite = force or (work.exists() and _command_of(output / NOTE) == command)  # killed after the folder appeared
    check_free(output, overwrite)
    if data is not None and not data.exists():
        raise FileNotFoundError(f"no file or folder {str(data)!r}")
    target = parse_length(length)
    objective = fitting.Objective(retrieval, task)
    constraint = fitting.Constraint(band, monotone, curve, scaling)
    starts = fitting.family(family) if family else (init or "yarn").split()
    if family is not None and (init is not None or steps):
        raise ValueError("--family scans its own starts without a step: leave --init and --steps out")
    steps = 0 if family else 40 if steps is None else steps
    schedule = fitting.Schedule(steps, batch_tokens, learning_rate, checks, patience, checkpointing, seed)
    if threads is not None:
        torch.set_num_threads(threads)
    hf_logging.disable_progress_bar()
    with claimed(output):
        tokenizer, loaded = load_tokenizer(model), load_model(model, None, device, dtype)
        options: dict[str, Any] = {"layer_types": layer_types, "freeze_at": freeze_at, "replace": replace}
        try:
            with tqdm(unit="tok", unit_scale=True, disable=as_json) as bar:

                def told(stage: str, tokens: int) -> None:
                    bar.set_postfix_str(stage, refresh=False)
                    bar.update(tokens)

                patch = fitting.fit(
                    loaded,
                    tokenizer,
                    data,
                    target_length=target,
                    init=starts,
                    objective=objective,
                    constraint=constraint,
                    schedule=schedule,
                    spec=fitting.held_out_spec(
                        loaded,
                        target,
                        task=task,
                        seed=seed,
                        freeze_at=freeze_at,
                        windows=windows,
                        depths=[depth(item) for item in items(depths)],
                        samples=samples,
                    ),
                    resume=work,
                    on_progress=told,
                    **options,
                )
        except KeyboardInterrupt:
            if work.exists():
                print(f"what was finished is kept in {work}: the same command goes on from there", file=sys.stderr)
            raise
        found = {
            "command": command,
            **patch.to_dict(),
            "settings": {"target_length": target, "objective": asdict(objective), "constraint": asdict(constraint),
                         "steps": steps, "learning_rate": learning_rate, "seed": seed},
            "environment": environment(loaded),
        }  # fmt: skip

        def finish(folder: Path) -> None:
            write_atomically(folder / NOTE, json.dumps(found, indent=1, allow_nan=False))
            if figure:
                write_atomically(folder / "fit.svg", plots.svg(_drawn(patch, target)))

        patch_folder(model, patch.method, output, overwrite=overwrite, finish=finish, target_length=target, **options)
        work.unlink(missing_ok=True)
    if as_json:
        print(json.dumps(found, indent=1, allow_nan=False))
        return
    _print(patch)
    print(
        f"wrote {output}: AutoModelForCausalLM.from_pretrained({str(output)!r}) loads it; fit.json says what was found"
    )


def _command_of(note: Path) -> str | None:
    """Return the command that a folder's notes are of."""
    try:
        return str(json.loads(note.read_text(encoding="utf-8"))["command"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _print(patch: Any) -> None:
    """Print what was judged on held-out text and prompts."""
    import math

    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160)
    (first, *_), *_ = patch.candidates.values()
    table = Table(title="on held-out text and prompts", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("start")
    table.add_column("table")
    for high in first.nll:
        table.add_column(f"ppl to {high}", justify="right")
    for high in first.hits:
        table.add_column(f"answered at {high}", justify="right")
    table.add_column("nats an answer", justify="right")
    table.add_column("")
    for label, several in patch.candidates.items():
        for candidate in several:
            chosen = patch.chosen == f"{label}, {candidate.name}"
            worse = "" if candidate.never_worse(several[0]) else "worse than its start"
            table.add_row(
                escape(label) if candidate is several[0] else "",
                candidate.name,
                *[f"{math.exp(value):.3f}" for value in candidate.nll.values()],
                *[f"{value:.2f}" for value in candidate.retrieval.values()],
                f"{candidate.answers:.3f}",
                "chosen" if chosen else worse,
                style="bold" if chosen else "",
            )
        if patch.stopped[label]:
            table.caption = f"{escape(label)}: {escape(patch.stopped[label])}"
        table.add_section()
    console.print(table)


def _drawn(patch: Any, target: int) -> Any:
    """Draw the table in use among others of the same factor."""
    from rope_patch.methods import as_method
    from rope_patch.plots import base as plots

    kind = patch.record.layer_types[0]
    before, after = patch.before[kind], patch.after[kind]
    factor = max(1.0, target / before.context)
    shown = {f"in use: {patch.chosen}": after.inv_freq}
    for text in (f"pi:factor={factor:g}", "abf", f"yarn:factor={factor:g}", "p_rope:p=0.5"):
        try:
            shown[text] = as_method(text)(before).inv_freq
        except ValueError:  # a base table that is scaled already
            continue
    title = f"The fitted table among others, for {target} tokens"
    return plots.factors_by_wavelength(shown, before=before.inv_freq, context=target, title=title)
