"""``rope-patch finetune``, and the recipe of that name: parsing and printing only; what takes long to import waits."""

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
    from rope_patch.planning import Shape
    from rope_patch.training.options import Options

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
"""What ``--smoke`` changes in any recipe: the bundled checkpoint, few and short rows; the method and the rest stay."""


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
        typer.Option("--dry-run", help="Print the options and the estimated memory and time, and stop."),
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
    run the same command again to continue from the last checkpoint. All options are listed in **lora.yaml**, which
    **rope-patch recipes copy** copies.

    Example: **rope-patch finetune model.name=./llama patch.method=yarn:factor=4 data.lengths=16k output=out**
    """
    from rope_patch.training.options import read

    given = options or []
    files = [word for word in given if word.endswith((".yaml", ".yml")) and "=" not in word]
    words = [word for word in given if word not in files]
    if smoke:
        bare = {"model": {"name": "llama"}, "data": {"lengths": "512"}, "output": "build/finetuned"}
        chosen = read(words=words, base=smoke_options(read(files, words, bare)))
    else:
        chosen = read(files, words)
    if dry_run:
        print(describe(chosen, gpu_memory))
        return
    with resumable(Path(chosen.output), again="the same command without --restart" if restart else "the same command"):
        _run(chosen, restart, threads)


def smoke_options(options: Options) -> dict[str, Any]:
    """Return the values of a run of a CPU minute that goes through the same code as these options."""
    from rope_patch.training.models import BUNDLED
    from rope_patch.training.options import FIT

    positions, stages = options.data.positions, len(options.stages)
    packed = options.model.quantization != "none"
    name = options.model.name if options.model.name in BUNDLED else BUNDLED["gemma" in options.model.name.lower()]
    changes: dict[str, dict[str, Any]] = {
        **SMOKE,
        "model": {**SMOKE["model"], "name": name},
        "data": {**SMOKE["data"], "lengths": "256" if positions != "full" else "256:0.5 512" if stages > 1 else "512"},
        "evaluation": {**SMOKE["evaluation"], "every": 0 if packed else 2, "before": not packed},
    }
    values = options.to_dict() | {"output": f"{options.output}-smoke"}
    if options.patch.method == FIT:
        changes["fit"] = {"steps": 2, "windows": 1, "samples": 1, "batch_tokens": None}
    return values | {section: values[section] | changed for section, changed in changes.items()}


def describe(options: Options, gpu_memory: float) -> str:
    """Return the options and what the run takes, from the config alone."""
    from rope_patch.planning import plan, shape_of
    from rope_patch.training.advice import changes
    from rope_patch.training.models import resolve
    from rope_patch.training.sources import plan_stages, reading_processes

    gpus, processes = int(os.environ.get("WORLD_SIZE", 1)), reading_processes()
    stages = plan_stages(options, processes)
    longest = max(length for length, *_ in stages)
    per_step = options.train.batch * options.train.accumulate * processes
    lines = [options.to_yaml(), f"{options.train.steps} steps of {per_step * longest} tokens:"]
    lines += [
        f"  {items // per_step} steps with {items * per} rows of {length} tokens" for length, items, per in stages
    ]
    shape = shape_of(resolve(options.model.name))
    planned = plan(
        shape,
        length=longest,
        batch=options.train.batch,
        lora_rank=options.lora.rank or None,
        target_modules=_targets(options, shape),
        long_lora=options.lora.long_lora,
        quantization=options.model.quantization,
        optimizer=options.train.optimizer.removeprefix("paged_"),
        checkpointing=options.train.checkpointing,
        attention=options.model.attention,
        dtype=options.model.dtype,
        gpus=gpus,
        context_parallel=gpus // processes,
    )
    gib = 2.0**30
    fits = "fits" if planned.fits(gpu_memory) else "does not fit"
    lines.append(f"memory of one GPU, predicted: {planned.total / gib:.1f} GiB, {fits} into {gpu_memory:g}")
    lines += [f"  {part.name:12s} {part.bytes / gib:8.2f}  {part.what}" for part in planned.parts if part.bytes]
    if options.model.dtype == "float32" and options.train.precision != "float32":
        lines.append("  (too much: activations are counted in float32, autocast keeps most of them in 16 bits)")
    if not planned.fits(gpu_memory):
        lines += ["change, each after those before it:", *changes(planned, gpu_memory)]
    hours = planned.compute.seconds * options.train.accumulate * options.train.steps / 3600
    o = planned.options
    lines.append(f"time: {hours:.1f} h, if {o.mfu:.0%} of {o.tflops:g} TFLOP/s per GPU are reached")
    return "\n".join(lines)


def _targets(options: Options, shape: Shape) -> tuple[str, ...]:
    """The projections with adapters, as the plan names them."""
    modules = options.lora.target_modules
    if options.lora.rank and modules == "attention":
        linears = [linear for layer in shape.kinds for linear in layer.linears if linear.place.startswith("attention")]
        return tuple(dict.fromkeys(linear.name.rpartition(".")[2] for linear in linears))
    if not options.lora.rank:
        return ("all-linear",)
    return (modules,) if isinstance(modules, str) else tuple(modules)


def _run(options: Options, restart: bool, threads: int | None) -> None:
    import torch
    from transformers.utils import logging as hf_logging

    from rope_patch.training.finetune import finetune as run

    hf_logging.disable_progress_bar()  # of loading weights; the Trainer's own stays
    warnings.filterwarnings("ignore", message="`(is_)?gradient_checkpointing(_enable)?` is deprecated")
    if threads is not None:
        torch.set_num_threads(threads)
    name = "rope-patch" if os.path.basename(sys.argv[0]) == "rope-patch" else f"python {sys.argv[0]}"
    try:
        result = run(options, command=f"{name} {shlex.join(sys.argv[1:])}", restart=restart)
    except torch.OutOfMemoryError as error:  # its advice has lines
        print(f"\nerror: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    except Exception:
        print(file=sys.stderr)  # below the progress bar
        raise
    if not result.results:  # another process prints
        return
    if result.again:
        print(f"{result.folder} was finished before: nothing was run")
    before, after = result.results["before"] or {}, result.results["after"]
    for name in list(after)[1:]:
        was = f"{before[name]:.3g} -> " if name in before else ""
        print(f"{name.replace('_', ' ', 1).replace('_', ' to ')}: {was}{after[name]:.3g}")
    verb = "it is in" if result.again else "wrote"
    print(f"{verb} {result.folder}: rope_patch.load({str(result.folder)!r}) loads it with its patch")
