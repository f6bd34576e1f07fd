"""What a run takes, estimated from its model's config: memory, tokens, and time of training and evaluation."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import torch

from rope_patch.evaluation.tasks import TASKS
from rope_patch.planning import Plan, Shape, plan, shape_of
from rope_patch.planning.compute import attention_flops
from rope_patch.training.advice import GIB, changes
from rope_patch.training.models import resolve
from rope_patch.training.recipe import RecipeOptions
from rope_patch.training.sources import plan_stages, reading_processes


def describe(options: RecipeOptions, gpu_memory: float, cpu_speed: float | None = None) -> str:
    """Return the options, the plan of a training step, the evaluations, and the time of both.

    Args:
        options: of the run.
        gpu_memory: of one GPU [GiB].
        cpu_speed: of this machine's CPU, if the run would use it [FLOP/s]; None leaves its line out.
    """
    planned = training_plan(options)
    lines = [options.to_yaml(), *_steps(options), *_memory(options, planned, gpu_memory)]
    count, tokens = evaluations(options), tokens_read(options)
    lines.append(f"evaluation: {_times(options)}, about {tokens:,} tokens each time, {count * tokens:,} in all")
    training = planned.compute.executed_flops * options.train.accumulate * options.train.steps
    evaluation = evaluation_flops(options, planned.shape) * count
    o = planned.options
    gpu = o.tflops * 1e12 * o.mfu
    lines.append(
        f"time on {o.gpus} GPU{'s' * (o.gpus > 1)}: {duration(training / (gpu * o.gpus))} of training and "
        f"{duration(evaluation / gpu)} of evaluation, if {o.mfu:.0%} of {o.tflops:g} TFLOP/s per GPU are reached"
    )
    if cpu_speed is not None:
        lines.append(
            f"time on this CPU: at least {duration(training / cpu_speed)} of training and "
            f"{duration(evaluation / cpu_speed)} of evaluation, at the {cpu_speed / 1e9:.0f} GFLOP/s that a float32 "
            "matrix product reaches here; models with small layers take several times as long"
        )
    lines += [f"warning: {warning}" for warning in options.warnings()]
    if options.patch.method is None and not options.patch.trainable:
        lines.append(
            "warning: there is no patch.method: unless the checkpoint has a patch of its own, the model keeps its "
            "original rotary table"
        )
    return "\n".join(lines)


def training_plan(options: RecipeOptions) -> Plan:
    """Return the plan of one forward and backward pass at the longest length."""
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
    """The projections with adapters, as the plan names them."""
    targets = options.lora.target_modules
    if options.lora.rank and targets == "attention":
        linears = [linear for layer in shape.kinds for linear in layer.linears if linear.place.startswith("attention")]
        return tuple(dict.fromkeys(linear.name.rpartition(".")[2] for linear in linears))
    if not options.lora.rank:
        return ("all-linear",)
    return (targets,) if isinstance(targets, str) else tuple(targets)


def _steps(options: RecipeOptions) -> Iterator[str]:
    stages = plan_stages(options, reading_processes())
    rows = options.train.batch * options.train.accumulate * reading_processes()
    yield f"{options.train.steps} steps of {rows * max(length for length, *_ in stages)} tokens:"
    for length, items, rows_per_item in stages:
        yield f"  {items // rows} steps with {items * rows_per_item} rows of {length} tokens"


def _memory(options: RecipeOptions, planned: Plan, gpu_memory: float) -> Iterator[str]:
    fits = "fits" if planned.fits(gpu_memory) else "does not fit"
    yield f"memory of one GPU, predicted: {planned.total / GIB:.1f} GiB, {fits} into {gpu_memory:g}"
    for part in planned.parts:
        if part.bytes:
            yield f"  {part.name:12s} {part.bytes / GIB:8.2f}  {part.what}"
    if options.model.dtype == "float32" and options.train.precision != "float32":
        yield "  (an upper bound: activations count as float32, and autocast keeps most of them in 16 bits)"
    if not planned.fits(gpu_memory):
        yield "change these, each after those before it:"
        yield from changes(planned, gpu_memory)


def evaluations(options: RecipeOptions) -> int:
    """Return how often the model is evaluated: before training, every so many steps, and at the end if not there."""
    every, steps = options.evaluation.every, options.train.steps
    return options.evaluation.before + (max(1, steps // every) if every else 1)


def _times(options: RecipeOptions) -> str:
    evaluation, count = options.evaluation, evaluations(options)
    needles = 1 if TASKS[evaluation.task].joined else len(evaluation.depths)
    prompts = evaluation.samples * needles * len(options.evaluation_lengths)
    lengths = " and ".join(map(str, options.evaluation_lengths))
    when = [
        *(["before training"] * evaluation.before),
        f"every {evaluation.every} steps" if evaluation.every else "at the end",
    ]
    times = "once" if count == 1 else f"{'up to ' * bool(evaluation.patience)}{count} times"
    windows = f"{evaluation.windows} windows of {max(options.evaluation_lengths)} tokens and " * bool(
        evaluation.windows
    )
    return f"{times} ({', '.join(when)}), {windows}{prompts} prompts of {lengths} tokens"


def _shares(options: RecipeOptions) -> float:
    """How many times the length of a haystack is read for all its prompts: what they share is read once.

    In mode ``single`` a prompt shares the text before its needle with the one whose needle is deepest.
    """
    asked = options.evaluation
    if asked.mode != "single" or TASKS[asked.task].joined:
        return 1.0
    *others, _ = sorted(asked.depths)
    return 1.0 + sum(1.0 - depth for depth in others)


def tokens_read(options: RecipeOptions) -> int:
    """Return the tokens that one evaluation reads, about."""
    windows, lengths = options.evaluation.windows, options.evaluation_lengths
    return round(windows * max(lengths) + options.evaluation.samples * _shares(options) * sum(lengths))


def evaluation_flops(options: RecipeOptions, shape: Shape) -> float:
    """Return the FLOPs of one evaluation, forward passes alone; each process does all of them."""
    windows, lengths = options.evaluation.windows, options.evaluation_lengths
    sequences = {length: options.evaluation.samples * _shares(options) for length in lengths}
    sequences[max(lengths)] += windows
    weights = 2.0 * shape.total(lambda layer: layer.matmul_weights)
    flops = 2.0 * shape.head * windows * max(lengths)  # retrieval needs the logits of answers alone
    for length, count in sequences.items():
        scores = shape.total(lambda layer, length=length: attention_flops(layer, length))  # type: ignore[misc]
        flops += count * (length * weights + scores)
    return flops


def matmul_speed(size: int = 1024, seconds: float = 0.1) -> float:
    """Measure and return the speed of float32 matrix products on this CPU [FLOP/s]."""
    a, b = torch.ones(size, size), torch.ones(size, size)
    a @ b  # the first one starts the threads
    start, products = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        a @ b
        products += 1
    return 2.0 * size**3 * products / elapsed


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it.

    >>> duration(0.4), duration(100), duration(5400), duration(86400)
    ('0.4 s', '1.7 min', '1.5 h', '24.0 h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
