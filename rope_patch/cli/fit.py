"""``rope-patch fit``: parsing and printing only; what takes long to import waits."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from rope_patch.cli.fit_plan import announced, planned
from rope_patch.cli.fit_tables import figure_of, print_fit
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
    Budget,
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
    Threads,
    chosen,
    command_line,
    resumable,
    tokens,
)
from rope_patch.packaged import name_of

NOTE = "fit.json"


# Longer than a screen: the signature is the options, each with its help, and the docstring is the help of the command.
def fit(
    context: typer.Context,
    model: Checkpoint,
    target_length: Annotated[
        int, tokens("--target-length", "The context length to fit the table to, such as 8k.", show_default=False)
    ],
    output: NewFolder,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text",
            metavar="PATH",
            help="A text file, or a folder of .txt files, to fit to. It is taken as one kind of text, and Python code "
            "is mixed in (--mix). Repeat the option for texts of several kinds: as many rows are drawn from each, and "
            "nothing is mixed in. By default, the code of Python's standard library.",
            show_default=False,
        ),
    ] = None,
    mix: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="How much of what the table is fitted to is code of Python's standard library, where --text is of one "
            "kind: at least 0 and less than 1. With 0 it is fitted to your text alone.",
        ),
    ] = 0.5,
    second_text: Annotated[
        str,
        typer.Option(
            "--second-text",
            metavar="NAME|PATH",
            help="Text of another kind than --text, which decides too: a table that predicts it worse than its start "
            "does is not chosen. A file or folder of yours; builtin (the documentation of Python); or none.",
        ),
    ] = "builtin",
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
            "The length of the rows with --positions pose. By default the trained length, or a quarter of the target "
            "length where that is longer, but at most 2048.",
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
            help="The share of each update that comes from the loss of answers to retrieval prompts, at least 0 and "
            "less than 1; the rest comes from the loss of text. With 0 no prompt takes part: such fits lose retrieval, "
            "and were found worse on text of another kind.",
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
        typer.Option(
            metavar="COUNT",
            help="Stop after this many evaluations without a lower held-out loss, if --checks is larger.",
        ),
    ] = 2,
    windows: Annotated[
        int,
        typer.Option(
            metavar="COUNT",
            help="The number of pieces of held-out text to evaluate on, each of the target length. Without this "
            "option, fewer if the model is large.",
        ),
    ] = 8,
    depths: Depths = (0.0, 0.25, 0.5, 0.75, 1.0),
    samples: Samples = 4,
    budget: Budget = None,
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
        bool,
        typer.Option(
            "--checkpointing", help="Use gradient checkpointing: less memory, but the forward pass is computed twice."
        ),
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
    to evaluate tables on, and so is a second text, of another kind: the table that is chosen is no worse than the
    starting table on either text, and does not answer significantly fewer prompts. A gain on text like that of the fit
    need not carry over to other text: compare the result with its start on your own text. The result is a patched
    copy of the checkpoint that plain transformers loads. **fit.json** holds the measurements, **fit.svg** a plot of the
    table. If the command is interrupted, run it again to continue: finished work is saved in **OUTPUT.fit.jsonl** until
    the end.

    Example: **rope-patch fit ./llama --target-length 8k --text ./books -o ./llama-8k**
    """
    from rope_patch import fitting
    from rope_patch.checkpoints.offline import check_free, patch_folder
    from rope_patch.evaluation.compare import environment
    from rope_patch.files import claimed, write_atomically
    from rope_patch.fitting.estimate import FitCost

    if figure:
        from rope_patch.plots import base as plots
    check_dtype(dtype)
    check_device(device)
    _check_places(model, output)
    place = Path(os.path.abspath(output))  # "." has no name
    work, command = place.with_name(f"{place.name}.fit.jsonl"), command_line()
    overwrite = force or (work.exists() and _command_of(output / NOTE) == command)  # killed after the folder appeared
    check_free(output, overwrite)
    second = {"builtin": True, "none": False}.get(second_text, Path(second_text))
    check_paths(*(text or ()), second if isinstance(second, Path) else None)
    objective = fitting.Objective(retrieval, task, positions=positions, row_length=row_length, chunks=chunks, mix=mix)
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
        held = 0 if second is False else None  # windows of the second domain: as many as of the first
        whole = FitCost(spec, objective, schedule, spec.lengths[0], second=held, starts=len(starts))
        spec, schedule, pace = planned(whole, loaded, budget, chosen(context), work, quiet=as_json)
        with resumable(work), progress_bar(None, hidden=as_json) as (bar, on_progress):

            def announce(cost: Any) -> None:
                if pace is not None and not as_json:
                    bar.clear()
                    announced(cost, pace, budget)
                    bar.reset(cost.tokens)

            patch = fitting.fit(
                loaded,
                tokenizer,
                _sources(text),
                target_length=target_length,
                second=second,
                init=starts,
                objective=objective,
                constraint=constraint,
                schedule=schedule,
                spec=spec,
                resume=work,
                on_start=announce,
                on_progress=on_progress,
                **options,
            )
            bar.total = bar.n  # a fit that stopped early, or went on from finished work, read less
        result = {
            "command": command,
            **patch.to_dict(),
            "settings": {"target_length": target_length, "objective": asdict(objective), "rows": rows,
                         "constraint": asdict(constraint), "steps": schedule.steps, "learning_rate": learning_rate,
                         "seed": seed},
            "environment": environment(loaded),
        }  # fmt: skip

        def finish(folder: Path) -> None:
            _describe(folder, model, patch, target_length, rows, result["environment"].get("weights", "unchanged"))
            write_atomically(folder / NOTE, json.dumps(result, indent=1, allow_nan=False))
            if figure:
                write_atomically(folder / "fit.svg", plots.svg(figure_of(patch, target_length)))

        patch_folder(
            model, patch.method, output, overwrite=overwrite, finish=finish, target_length=target_length, **options
        )
        work.unlink(missing_ok=True)
    if as_json:
        print(json.dumps(result, indent=1, allow_nan=False))
        return
    print_fit(patch)
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
        raise ValueError(
            f"fit writes a folder, got {str(output)!r}: rope-patch export --to gguf --converter PATH makes a file of it"
        )
    if output.exists() and not output.is_dir():
        raise FileExistsError(f"{str(output)!r} is a file: give a folder to write")


def _sources(paths: list[Path] | None) -> Any:
    """Return the text to fit to: one source, or several by name."""
    if not paths or len(paths) == 1:
        return paths[0] if paths else None
    named = {path.name: path for path in paths}
    return named if len(named) == len(paths) else {str(path): path for path in paths}


def _describe(folder: Path, model: str, patch: Any, length: int, rows: str, weights: str) -> None:
    """Put a model card in the place of the base's, and leave out what else was recorded of the base."""
    from rope_patch.files import write_atomically
    from rope_patch.fitting import card

    for name in card.BASE_RECORDS:
        (folder / name).unlink(missing_ok=True)
    path = folder / "README.md"
    base_card = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
    local = Path(model).exists()
    base = name_of(model) if local else model
    write_atomically(path, card.card(base, patch, length, base_card, rows=rows, on_hub=not local, weights=weights))


def _command_of(note: Path) -> str | None:
    """Return the command that wrote a folder."""
    try:
        return str(json.loads(note.read_text(encoding="utf-8"))["command"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
