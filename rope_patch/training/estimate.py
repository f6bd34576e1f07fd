"""What a run takes, from its model's config alone: steps, tokens, predicted memory, and what to change for less."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from rope_patch.evaluation.tasks import TASKS
from rope_patch.options.finetune import RecipeOptions
from rope_patch.options.plan import ALL_LINEAR
from rope_patch.options.writing import to_yaml
from rope_patch.planning import Plan, Shape, plan, shape_of
from rope_patch.training.models import resolve
from rope_patch.training.sources import plan_stages, reading_processes

GIB = 2**30

WITHOUT_PLAN = (
    "No plan covers this model ({reason}). These take less memory, in this order: train.batch=1 with a larger "
    "train.accumulate; model.attention=flash; train.optimizer=adamw_8bit; model.quantization=nf4 under LoRA; shorter "
    "data.lengths; FSDP over more GPUs"
)

RECIPE_NAMES = {
    "attention": "model.attention={}",
    "checkpointing": "train.checkpointing={}",
    "batch": "train.batch={}",
    "optimizer": "train.optimizer={}",
    "lora_rank": "lora.rank={}",
    "quantization": "model.quantization={}",
    "dtype": "model.dtype={}",
    "gpus": "FSDP over {} GPUs",
    "context_parallel": "{} of the GPUs sharing each row (context parallel, cp_size)",
}
"""The options of a plan, as the recipe sets them; its loss is fused in any case."""


def describe(options: RecipeOptions, gpu_memory: float) -> str:
    """Return the options, the steps, the memory of a training step, and the evaluations.

    Args:
        options: the options of the run.
        gpu_memory: the memory of one GPU [GiB].
    """
    warnings = options.warnings()
    if options.patch.method is None:
        warnings.append(
            "there is no patch.method: unless the checkpoint has a patch of its own, the model keeps its original "
            "rotary table"
        )
    planned = training_plan(options)
    lines = [
        to_yaml(options, comments=False),
        *_steps(options),
        *_memory(options, planned, gpu_memory),
        _evaluations(options),
    ]
    return "\n".join([*lines, *(f"warning: {warning}" for warning in warnings)])


def memory_advice(options: RecipeOptions, gpu_memory: float | None) -> str:
    """Return the predicted memory of a training step, and what to change where it does not fit.

    Args:
        options: the options of a run that ran out of memory.
        gpu_memory: the memory of one GPU [GiB]; None where there is none.
    """
    try:
        planned = training_plan(options)
    except (ValueError, TypeError, OSError) as error:
        return WITHOUT_PLAN.format(reason=error)
    return "\n".join(_memory(options, planned, planned.total / GIB if gpu_memory is None else gpu_memory))


def training_plan(options: RecipeOptions) -> Plan:
    """Return the plan of one forward and backward pass at the longest length.

    Raises:
        ValueError: a model that no plan covers.
    """
    gpus, processes = int(os.environ.get("WORLD_SIZE", 1)), reading_processes()
    shape = shape_of(resolve(options.model.name))
    return plan(
        shape,
        length=max(length for length, _ in options.stages),
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


def _targets(options: RecipeOptions, shape: Shape) -> tuple[str, ...]:
    """Return the projections with adapters, as the plan names them."""
    targets = options.lora.target_modules
    if options.lora.rank and targets == ("attention",):
        linears = [linear for layer in shape.kinds for linear in layer.linears if linear.place.startswith("attention")]
        return tuple(dict.fromkeys(linear.name.rpartition(".")[2] for linear in linears))
    return targets if options.lora.rank else (ALL_LINEAR,)


def _steps(options: RecipeOptions) -> Iterator[str]:
    """Yield the steps, and the rows of each length."""
    stages = plan_stages(options, reading_processes())
    rows = options.train.batch * options.train.accumulate * reading_processes()
    yield f"{options.train.steps} steps of {rows * max(length for length, *_ in stages)} tokens:"
    for length, items, rows_per_item in stages:
        yield f"  {items // rows} steps with {items * rows_per_item} rows of {length} tokens"


def _memory(options: RecipeOptions, planned: Plan, gpu_memory: float) -> Iterator[str]:
    """Yield the predicted memory by part and, where it does not fit, what to change."""
    fits = "fits" if planned.fits(gpu_memory) else "does not fit"
    yield f"a training step on one GPU is predicted to take {planned.total / GIB:.1f} GiB, {fits} into {gpu_memory:.4g}"
    for part in planned.parts:
        if part.bytes:
            yield f"  {part.name:12s} {part.bytes / GIB:8.2f}  {part.what}"
    if options.model.dtype == "float32" and options.train.precision != "float32":
        yield "  (an upper bound: activations count as float32, and autocast keeps most of them in 16 bits)"
    if not planned.fits(gpu_memory):
        yield "change these, each after those before it:"
        yield from _changes(planned, gpu_memory)


def _changes(planned: Plan, gpu_memory: float) -> Iterator[str]:
    """Yield what to change, in order, with the total after each change."""
    longest = planned.longest(gpu_memory)
    if planned.options.dtype == "float32" and planned.options.lora_rank is not None:
        planned = planned.but(dtype="bfloat16")
        yield _line({"dtype": "bfloat16"}, planned.total)
    for step in planned.advice(gpu_memory):
        yield _line(step.changes, step.total, f" ({step.cost})")
        planned = planned.but(**step.changes)
    if not planned.fits(gpu_memory):
        yield "No change that the plan knows makes it fit"
    if longest:
        yield f"Or shorter rows: up to {longest} tokens fit without these steps"


def _line(changes: Mapping[str, Any], total: int, cost: str = "") -> str:
    settings = ", ".join(RECIPE_NAMES[name].format(str(value).lower()) for name, value in changes.items())
    return f"- {settings}: {total / GIB:.1f} GiB{cost}"


def evaluations(options: RecipeOptions) -> int:
    """Return how often the model is evaluated: before training, every so many steps, and at the end if not there."""
    every, steps = options.evaluation.every, options.train.steps
    return options.evaluation.before + (max(1, steps // every) if every else 1)


def _evaluations(options: RecipeOptions) -> str:
    asked, lengths = options.evaluation, options.evaluation_lengths
    needles = 1 if TASKS.find(asked.task).joined else len(asked.spec.depths)
    prompts = asked.spec.samples * needles * len(lengths)
    most = "up to " if asked.patience else ""
    return (
        f"evaluations: {most}{evaluations(options)}, each of {asked.spec.windows} windows of {max(lengths)} tokens and "
        f"{prompts} prompts of {' and '.join(map(str, lengths))} tokens"
    )
