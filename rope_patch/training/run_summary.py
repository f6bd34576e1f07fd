"""Describes a run from its model's config alone: steps, tokens, predicted memory, and what to change for less."""

from __future__ import annotations

import os

from rope_patch.evaluation.tasks import TASKS
from rope_patch.options.finetune import RecipeOptions
from rope_patch.options.yaml_and_json import to_yaml
from rope_patch.planning import Plan, plan
from rope_patch.training.models import bundled_folder_or_name
from rope_patch.training.pack_rows import rows_per_step


def describe(options: RecipeOptions, gpu_memory: float) -> str:
    """Return a text with the options, the steps, the memory of a training step, and the evaluations.

    Args:
        options: the options of the run.
        gpu_memory: the memory of one GPU [GiB].
    """
    asked, lengths, steps = options.evaluation, options.evaluation_lengths, options.train.steps
    # A task of several needles spreads them over one prompt; any other is asked once at every depth.
    needles = 1 if TASKS.find(asked.task).joined else len(asked.spec.depths)
    # After training, before it if there is an adapter to disable, and at every interval of steps.
    times = 1 + (asked.before and options.lora.rank > 0) + (steps // asked.every if asked.every else 0)
    lines = [
        to_yaml(options, comments=False),
        f"{steps} steps of {rows_per_step(options) * options.data.length} tokens",
        training_plan(options).describe(gpu_memory),
        f"evaluations: {times}, each of {asked.spec.windows} windows of {max(lengths)} tokens and "
        f"{asked.spec.samples * needles * len(lengths)} prompts of {' and '.join(map(str, lengths))} tokens",
    ]
    return "\n".join(lines)


def training_plan(options: RecipeOptions) -> Plan:
    """Return the memory plan of one forward and backward pass.

    Raises:
        ValueError: a plan does not cover this kind of model.
    """
    gpus = int(os.environ.get("WORLD_SIZE", 1))
    return plan(
        bundled_folder_or_name(options.model.name),
        length=options.data.length,
        batch=options.train.batch,
        lora_rank=options.lora.rank or None,
        target_modules=options.lora.target_modules,
        quantization=options.model.quantization,
        optimizer=options.train.optimizer.removeprefix("paged_"),
        checkpointing=options.train.checkpointing,
        attention=options.model.attention,
        dtype=options.model.dtype,
        gpus=gpus,
        # The processes over the readers: how many of them share each row.
        context_parallel=gpus * options.train.batch * options.train.accumulate // rows_per_step(options),
    )
