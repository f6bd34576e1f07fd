"""``rope-patch fit``: parsing and printing only; what takes long to import waits."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rope_patch.cli.loading import (
    check_device,
    check_dtype,
    check_paths,
    load_model,
    load_tokenizer,
    prepare,
    progress_bar,
)
from rope_patch.cli.options import Checkpoint, Device, Dtype, Import, Seed, command_line, tokens
from rope_patch.options.shared import Machine

if TYPE_CHECKING:
    from rope_patch.fitting import FittedPatch
    from rope_patch.fitting.estimate import FitCost

CARRIES_OVER = (
    "A gain on text like the fit's need not carry over to other text: in tests fitted tables read stories 1 to 4.6 % "
    "better than YaRN's table, and the far positions of novels up to 4.6 % worse. Compare the table with the one it "
    "started from on text of your own."
)


# Longer than a screen: the signature is the options, each with its help, and the docstring is the help of the command.
def fit(
    model: Checkpoint,
    target_length: Annotated[
        int, tokens("--target-length", "The context length to fit the table to, such as 8k.", show_default=False)
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FOLDER", help="The folder to write, new or empty.", show_default=False),
    ],
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="A text file, or a folder of .txt files, to fit to. By default, Python's own code.",
            show_default=False,
        ),
    ] = None,
    init: Annotated[str, typer.Option(metavar="METHOD", help="The method whose table the fit starts from.")] = "yarn",
    retrieval: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="The share of each update that comes from the loss of answers to retrieval prompts, at least 0 and "
            "less than 1; the rest comes from the loss of text. With 0 no prompt takes part: such fits lose retrieval, "
            "and were found worse on text of another kind.",
        ),
    ] = 0.8,
    positions: Annotated[
        str,
        typer.Option(
            metavar="full|pose",
            help="full: the rows of the fit are long, up to the target length. pose: they are short, and their "
            "position numbers jump ahead, so that distances up to the target length occur in them (PoSE, Zhu et al. "
            "2023); a step then takes about the same time and memory at every target length.",
        ),
    ] = "full",
    steps: Annotated[
        int, typer.Option(metavar="COUNT", help="The number of optimizer steps; 0 only measures the starting table.")
    ] = 40,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    imports: Import = None,
) -> None:
    """Fit the rotary table of a checkpoint to a longer context by gradient descent; the weights do not change.

    The fit learns from pieces of text and from retrieval prompts made of them. The last tenth of the text is held out
    to evaluate tables on, and so is the documentation of Python: the table that is chosen is no worse than the starting
    table on either text, and does not answer significantly fewer prompts. A gain on text like that of the fit need not
    carry over to other text: compare the result with its start on your own text. The result is a patched copy of the
    checkpoint that plain transformers loads; **fit.json** holds the measurements. If the command is interrupted,
    nothing is written.

    Example: **rope-patch fit ./llama --target-length 8k --text ./books -o ./llama-8k**
    """
    from rope_patch import fitting
    from rope_patch.checkpoints.offline import patch_folder
    from rope_patch.evaluation.compare import environment
    from rope_patch.fitting.estimate import FitCost
    from rope_patch.runtime.folders import claimed, holds_files, write_atomically

    check_dtype(dtype)
    check_device(device)
    _check_source(model)
    if holds_files(output):
        raise FileExistsError(f"{output} is not empty: give a new folder")
    check_paths(text)
    prepare(None)
    with claimed(output):
        tokenizer, loaded = load_tokenizer(model), load_model(model, Machine(device, dtype))
        spec = fitting.held_out_spec(loaded, target_length, seed=seed)
        cost = _planned(FitCost(spec, spec.lengths[0], steps, positions), loaded)
        settings: dict[str, Any] = {"init": init, "retrieval": retrieval, "positions": positions, "steps": steps}
        settings |= {"target_length": target_length, "seed": seed}
        with progress_bar(cost.tokens) as (_, on_progress):
            patch = fitting.fit(loaded, tokenizer, text, spec=cost.spec, on_progress=on_progress, **settings)
        note = {"command": command_line(), **patch.to_dict(), "settings": settings, "environment": environment(loaded)}

        def finish(folder: Path) -> None:
            write_atomically(folder / "fit.json", json.dumps(note, indent=1, allow_nan=False))

        patch_folder(model, patch.method, output, finish=finish, target_length=target_length)
    for line in described(patch):
        print(line)
    print(f"wrote {output}: AutoModelForCausalLM.from_pretrained({str(output)!r}) loads it; fit.json has the numbers")


def described(patch: FittedPatch) -> Iterator[str]:
    """Yield a line for each table, the changes of the one in use from its start, and what to know before its use."""
    from rope_patch.evaluation.intervals import OF_PROMPTS, OF_WINDOWS
    from rope_patch.evaluation.metrics import METRICS
    from rope_patch.fitting.candidates import MEASURED

    for candidate in patch.candidates:
        text, second, shares = (candidate.means[kind] for kind in MEASURED)
        losses = ("/".join(f"{math.exp(nll):.3f}" for nll in several.values()) for several in (text, second))
        found = "/".join(f"{share:.2f}" for share in shares.values())
        yield f"{candidate.name:8}  perplexity {next(losses)}, of the second domain {next(losses)}, answered {found}"
    if patch.stopped:
        yield f"The fit was stopped: it {patch.stopped}."
    if patch.chosen == "start":
        yield "There was nothing to gain: no fitted table is better than the start, which is written as it is."
    else:
        yield f"Chosen: {patch.chosen}. Change from the start, with 95 % intervals:"
        for kind, several in patch.winner.changes(patch.candidates[0]).items():
            parts = (f"{n}: {METRICS[MEASURED[kind][0]].describe(change)}" for n, change in several.items())
            yield f"- {kind} to {', '.join(parts)}"
        yield f"{OF_WINDOWS} {OF_PROMPTS} {CARRIES_OVER}"
    for sentence in patch.warnings:
        yield f"Warning: {sentence}."


def _planned(cost: FitCost, model: Any) -> FitCost:
    """Return the fit that suits the size of the model, and print what it reads."""
    from rope_patch.evaluation.budget import default_tokens
    from rope_patch.evaluation.spec import cost_of

    smaller = cost.within(default_tokens(model))
    if smaller != cost:
        print(cost_of(cost.spec, smaller.spec), file=sys.stderr)
    print(f"reads {smaller.tokens:,} tokens", file=sys.stderr)
    return smaller


def _check_source(model: str) -> None:
    """Raise where the checkpoint is none that can be fitted."""
    from rope_patch.checkpoints.adapters import is_adapter
    from rope_patch.runtime.folders import check_source

    check_source(model)
    if is_adapter(model):
        raise ValueError(f"{model} is an adapter: merge it into its base first, and fit that")
