"""``rope-patch finetune`` and ``recipes/finetune_lora.py``: parsing and printing; slow imports are inside functions."""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rope_patch.cli.options import GpuMemory, Import, Threads, resumable

if TYPE_CHECKING:
    from rope_patch.training.recipe import RecipeOptions

SMOKE: dict[str, Any] = {
    "model": {"dtype": "float32", "attention": "sdpa", "revision": None},
    "patch": {"target_length": 1024},
    "data": {"source": "builtin", "column": "text", "learn": "all", "streaming": False, "allow_short": False},
    "train": {
        "steps": 4,
        "batch": 1,
        "precision": "float32",
        "accumulate": 2,
        "warmup": 1,
        "save_every": 2,
        "log_every": 1,
        "liger": False,
    },
    "evaluation": {"lengths": "256 1024", "samples": 1, "depths": [0.1, 0.9], "windows": 2, "patience": 0},
}
"""What ``--smoke`` changes in any recipe: a bundled checkpoint, few and short rows. Patch, LoRA and positions stay."""


def finetune(
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE.yaml | KEY=VALUE]...",
            help="The options of the run, as YAML files and as single values. Later ones replace earlier ones.",
        ),
    ] = None,
    smoke: Annotated[
        bool,
        typer.Option(
            "--smoke", help="Try the run in about a minute on a CPU: a small bundled checkpoint and few steps."
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the options, the steps, the predicted memory and the evaluations, and stop."
        ),
    ] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Delete an earlier run in the output folder and start again.")
    ] = False,
    gpu_memory: GpuMemory = 80,
    threads: Threads = None,
    imports: Import = None,
) -> None:
    """Fine-tune a patched checkpoint at a longer context with LoRA or QLoRA.

    The result is an adapter with its patch and with the scores before and after training. If the run is interrupted,
    run the same command again to continue from the last checkpoint. Three options are required: **model.name**,
    **data.lengths** (the length of the rows) and **output**. All options are listed in **lora.yaml**, which
    **rope-patch recipes copy** copies.

    Example: **rope-patch finetune model.name=./llama patch.method=yarn:factor=4 data.lengths=16k output=out**
    """
    from rope_patch.training.reading import read

    arguments = options or []
    files = [argument for argument in arguments if argument.endswith((".yaml", ".yml")) and "=" not in argument]
    overrides = [argument for argument in arguments if argument not in files]
    if smoke:
        required = {"model": {"name": "llama"}, "data": {"lengths": "512"}, "output": "build/finetuned"}
        recipe = read(overrides=overrides, base=smoke_options(read(files, overrides, required)))
    else:
        recipe = read(files, overrides)
    if dry_run:
        from rope_patch.training.estimate import describe

        print(describe(recipe, gpu_memory))
        return
    with resumable(Path(recipe.output), again="the same command without --restart" if restart else "the same command"):
        _run(recipe, restart, threads)


def smoke_options(options: RecipeOptions) -> dict[str, Any]:
    """Return options of a run that uses the same code as these and takes about a minute on a CPU."""
    from rope_patch.training.models import BUNDLED

    positions, stages = options.data.positions, len(options.stages)
    quantized = options.model.quantization != "none"
    name = options.model.name if options.model.name in BUNDLED else BUNDLED["gemma" in options.model.name.lower()]
    changes: dict[str, dict[str, Any]] = {
        **SMOKE,
        "model": {**SMOKE["model"], "name": name},
        "data": {**SMOKE["data"], "lengths": "256" if positions != "full" else "256:0.5 512" if stages > 1 else "512"},
        "evaluation": {**SMOKE["evaluation"], "every": 0 if quantized else 2, "before": not quantized},
    }
    values = options.to_dict() | {"output": f"{options.output}-smoke"}
    return values | {section: values[section] | changed for section, changed in changes.items()}


def _run(options: RecipeOptions, restart: bool, threads: int | None) -> None:
    import torch
    from transformers.utils import logging as hf_logging

    from rope_patch.training.finetune import finetune as train

    warnings.formatwarning = lambda message, *place, **more: f"warning: {message}\n"  # without a line of our source
    hf_logging.disable_progress_bar()  # that of loading weights; the Trainer's own stays
    warnings.filterwarnings("ignore", message=r"Could not find a config file in .*\.gguf")  # PEFT's, of a base's file
    warnings.filterwarnings("ignore", message="`(is_)?gradient_checkpointing(_enable)?` is deprecated")
    if threads is not None:
        torch.set_num_threads(threads)
    name = "rope-patch" if os.path.basename(sys.argv[0]) == "rope-patch" else f"python {sys.argv[0]}"
    try:
        result = train(options, command=f"{name} {shlex.join(sys.argv[1:])}", restart=restart)
    except torch.OutOfMemoryError as error:  # its advice has several lines
        print(f"\nerror: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    except (Exception, KeyboardInterrupt):
        print(file=sys.stderr)  # below the progress bar
        raise
    if not result.results:  # the first process prints
        return
    if result.finished_before:
        print(f"{result.folder}: this run was finished before, nothing was trained now")
    before, after = result.results["before"] or {}, result.results["after"]
    for name in list(after)[1:]:
        earlier = f"{before[name]:.3g} -> " if name in before else ""
        print(f"{name.replace('_', ' ', 1).replace('_', ' to ')}: {earlier}{after[name]:.3g}")
    for change in result.results["changes"]:
        print(change["sentence"])
    for note in result.results["notes"]:
        print(f"note: {note}", file=sys.stderr)
    verb = "found" if result.finished_before else "wrote"
    print(f"{verb} {result.folder}: rope_patch.load({str(result.folder)!r}) loads it with its patch")
