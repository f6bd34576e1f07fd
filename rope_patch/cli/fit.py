"""``rope-patch fit``: parsing and printing only; what takes long to import waits."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from rope_patch.cli.loading import (
    check_device,
    check_dtype,
    check_paths,
    load_model,
    load_tokenizer,
    prepare,
    progress_bar,
    read_haystack,
)
from rope_patch.cli.options import (
    ChatTemplate,
    Checkpoint,
    Depths,
    Device,
    Dtype,
    Force,
    FreezeAt,
    Import,
    Json,
    LayerTypes,
    NewFolder,
    Replace,
    Samples,
    Seed,
    Task,
    Text,
    Threads,
    command_line,
    resumable,
    tokens,
)
from rope_patch.packaged import name_of

NOTE = "fit.json"


# Longer than a screen: the signature is the options, each with its help, and the docstring is the help of the command.
def fit(
    model: Checkpoint,
    target_length: Annotated[
        int, tokens("--target-length", "The context length to fit the table to, such as 8k.", show_default=False)
    ],
    output: NewFolder,
    text: Text = None,
    init: Annotated[
        str | None,
        typer.Option(
            metavar="METHODS",
            help='The methods whose tables the fit starts from, separated by spaces, for example "yarn abf:factor=50". '
            "Each is fitted, and the best result is written. By default yarn.",
            show_default=False,
        ),
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Do not fit: evaluate many parameters of one method instead, and write the best. Known: p_rope.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            metavar="COUNT",
            help="The number of optimizer steps; 0 only compares the starting tables. By default 40.",
            show_default=False,
        ),
    ] = None,
    batch_tokens: Annotated[
        int | None,
        tokens(
            "--batch-tokens",
            "The number of tokens in a step. By default twice the target length, or twice the row length with "
            "--positions pose, but at least 4096.",
            show_default=False,
        ),
    ] = None,
    positions: Annotated[
        str,
        typer.Option(
            metavar="full|pose",
            help="full: the rows of the fit are long, up to the target length. pose: they are short, and their "
            "position numbers jump ahead, so that distances up to the target length occur in them (PoSE, Zhu et al. "
            "2023); a step then takes the same time and memory at every target length. Tables are evaluated at the "
            "target length either way. Rows are plain text: the chat template is for the held-out prompts.",
        ),
    ] = "full",
    row_length: Annotated[
        int | None,
        tokens(
            "--row-length",
            "The length of the rows with --positions pose. By default the trained length, but at most 2048.",
            show_default=False,
        ),
    ] = None,
    chunks: Annotated[
        int,
        typer.Option(
            metavar="COUNT", help="The number of pieces that rows of text are cut into with --positions pose."
        ),
    ] = 2,
    learning_rate: Annotated[
        float, typer.Option(metavar="NUMBER", help="The learning rate for the logarithms of the frequencies.")
    ] = 0.04,
    retrieval: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="How much of the learning rate goes to answering retrieval prompts, at least 0 and less than 1; the "
            "rest goes to predicting text.",
        ),
    ] = 0.8,
    task: Task = "passkey",
    haystack: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|PATH",
            help="The text that held-out retrieval prompts hide their answers in: builtin, noise, or a file or folder. "
            "By default the held-out part of the text.",
            show_default=False,
        ),
    ] = None,
    chat_template: ChatTemplate = "auto",
    checks: Annotated[
        int,
        typer.Option(
            metavar="COUNT",
            help="The number of evaluations during the fit. A table that got worse is moved halfway back to its start.",
        ),
    ] = 2,
    patience: Annotated[
        int,
        typer.Option(metavar="COUNT", help="Stop after this many evaluations without a lower loss on held-out text."),
    ] = 2,
    windows: Annotated[
        int,
        typer.Option(
            metavar="COUNT", help="The number of pieces of held-out text to evaluate on, each of the target length."
        ),
    ] = 8,
    depths: Depths = (0.0, 0.25, 0.5, 0.75, 1.0),
    samples: Samples = 4,
    band: Annotated[
        float | None,
        typer.Option(
            metavar="FACTOR",
            help="Let no frequency change by more than this factor. By default there is no limit.",
            show_default=False,
        ),
    ] = None,
    monotone: Annotated[bool, typer.Option("--monotone", help="Keep the frequencies in descending order.")] = False,
    curve: Annotated[
        int | None,
        typer.Option(
            metavar="COUNT",
            help="Fit a smooth curve of this many cosines over the frequencies. By default each frequency is fitted by "
            "itself.",
            show_default=False,
        ),
    ] = None,
    scaling: Annotated[
        bool, typer.Option(help="Also fit the attention scaling, the factor on cosines and sines.")
    ] = False,
    layer_types: LayerTypes = None,
    freeze_at: FreezeAt = None,
    replace: Replace = False,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Use gradient checkpointing: less memory, up to a third more time.")
    ] = False,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
    force: Force = False,
    figure: Annotated[
        bool,
        typer.Option(help="Write fit.svg, a plot of the table. It needs matplotlib: pip install 'rope_patch[plots]'."),
    ] = True,
    imports: Import = None,
    as_json: Json = False,
) -> None:
    """Fit the rotary table of a checkpoint to a longer context by gradient descent; the weights do not change.

    The fit learns from pieces of text and from retrieval prompts made of them. The last tenth of the text is held out
    to evaluate tables on: the one that is chosen predicts it no worse than the starting table does, and does not answer
    significantly fewer prompts. The result is a patched copy of the checkpoint that plain transformers loads.
    **fit.json** holds the measurements, **fit.svg** a plot of the table. If the command is interrupted, run it again to
    continue: finished work is saved in **OUTPUT.fit.jsonl** until the end.

    Example: **rope-patch fit ./llama --target-length 8k --text ./books -o ./llama-8k**
    """
    from rope_patch import fitting
    from rope_patch.checkpoints.offline import check_free, patch_folder
    from rope_patch.evaluation.compare import environment
    from rope_patch.files import claimed, write_atomically

    if figure:
        from rope_patch.plots import base as plots
    check_dtype(dtype)
    check_device(device)
    _check_places(model, output)
    place = Path(os.path.abspath(output))  # "." has no name
    work, command = place.with_name(f"{place.name}.fit.jsonl"), command_line()
    overwrite = force or (work.exists() and _command_of(output / NOTE) == command)  # killed after the folder appeared
    check_free(output, overwrite)
    check_paths(text)
    objective = fitting.Objective(retrieval, task, positions=positions, row_length=row_length, chunks=chunks)
    constraint = fitting.Constraint(band, monotone, curve, scaling)
    starts = fitting.family(family) if family else (init or "yarn").split()
    if family is not None and (init is not None or steps):
        raise ValueError("--family scans its own starts without a step: leave --init and --steps out")
    steps = 0 if family else 40 if steps is None else steps
    schedule = fitting.Schedule(steps, batch_tokens, learning_rate, checks, patience, checkpointing, seed)
    if haystack is not None:
        read_haystack(haystack)
    prepare(threads)
    with claimed(output):
        tokenizer, loaded = load_tokenizer(model), load_model(model, None, device, dtype)
        options: dict[str, Any] = {"layer_types": layer_types, "freeze_at": freeze_at, "replace": replace}
        spec = fitting.held_out_spec(
            loaded,
            target_length,
            task=task,
            seed=seed,
            freeze_at=freeze_at,
            windows=windows,
            depths=depths,
            samples=samples,
            haystack=None if haystack is None else str(read_haystack(haystack)),
            chat_template=chat_template,
        )
        rows = objective.describe_rows(spec.lengths[0], target_length)
        with resumable(work), progress_bar(None, hidden=as_json) as (_, on_progress):
            patch = fitting.fit(
                loaded,
                tokenizer,
                text,
                target_length=target_length,
                init=starts,
                objective=objective,
                constraint=constraint,
                schedule=schedule,
                spec=spec,
                resume=work,
                on_progress=on_progress,
                **options,
            )
        result = {
            "command": command,
            **patch.to_dict(),
            "settings": {"target_length": target_length, "objective": asdict(objective), "rows": rows,
                         "constraint": asdict(constraint), "steps": steps, "learning_rate": learning_rate,
                         "seed": seed},
            "environment": environment(loaded),
        }  # fmt: skip

        def finish(folder: Path) -> None:
            _describe(folder, model, patch.chosen, text, target_length, rows)
            write_atomically(folder / NOTE, json.dumps(result, indent=1, allow_nan=False))
            if figure:
                write_atomically(folder / "fit.svg", plots.svg(_figure(patch, target_length)))

        patch_folder(
            model, patch.method, output, overwrite=overwrite, finish=finish, target_length=target_length, **options
        )
        work.unlink(missing_ok=True)
    if as_json:
        print(json.dumps(result, indent=1, allow_nan=False))
        return
    _print(patch)
    print(f"wrote {output}: AutoModelForCausalLM.from_pretrained({str(output)!r}) loads it; fit.json has the numbers")


def _check_places(model: str, output: Path) -> None:
    """Raise where the checkpoint is none that can be fitted, or the output would overwrite it."""
    from rope_patch.checkpoints.adapters import is_adapter
    from rope_patch.files import check_source

    check_source(model)
    if is_adapter(model):
        raise ValueError(f"{model} is an adapter: merge it into its base first, and fit that")
    if Path(model).is_dir() and output.exists() and output.samefile(model):
        raise ValueError(f"{output} is the checkpoint itself: give another output folder")
    if output.suffix == ".gguf" and not output.is_dir():
        raise ValueError(f"fit writes a folder, got {str(output)!r}: rope-patch export --to gguf makes a file of it")
    if output.exists() and not output.is_dir():
        raise FileExistsError(f"{str(output)!r} is a file: give a folder to write")


def _describe(folder: Path, model: str, chosen: str, text: Path | None, length: int, rows: str) -> None:
    """Put a model card in the place of the base's, and leave out what else was recorded of the base."""
    import platform

    from rope_patch.files import write_atomically
    from rope_patch.fitting import card

    for name in card.BASE_RECORDS:
        (folder / name).unlink(missing_ok=True)
    path = folder / "README.md"
    base_card = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
    source = f"text that ships with CPython {platform.python_version()}" if text is None else f"`{text.name}`"
    local = Path(model).exists()
    base = name_of(model) if local else model
    write_atomically(path, card.card(base, chosen, source, length, base_card, rows=rows, on_hub=not local))


def _command_of(note: Path) -> str | None:
    """Return the command that wrote a folder."""
    try:
        return str(json.loads(note.read_text(encoding="utf-8"))["command"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _print(patch: Any) -> None:
    """Print the evaluation of every table on held-out text and prompts."""
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


def _figure(patch: Any, target: int) -> Any:
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
