"""Turns a recipe's options into the arguments of transformers' Trainer, and refuses what cannot be trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.integrations.integration_utils import is_tensorboard_available
from transformers.utils.import_utils import is_liger_kernel_available

from rope_patch.evaluation.tasks import TASKS
from rope_patch.methods import as_method
from rope_patch.options.finetune import RecipeOptions

_CHECKPOINTING = next(
    name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, name)
)  # newer releases have the first name

OPTIMIZERS = {"adamw": "adamw_torch", "sgd": "sgd"}
"""transformers' names of optimizers that have another name in the options."""


def check_training(options: RecipeOptions) -> None:
    """Refuse unknown names, a warm-up without end, and quantized weights that would be trained or evaluated wrongly.

    Raises:
        ImportError: ``train.liger`` is set, and its package is missing.
        ValueError: the method or task is unknown, the warm-up is longer than the run, or quantized weights would be
            evaluated before the end on a CPU or trained through Liger.
    """
    if options.patch.method is not None:
        as_method(options.patch.method)
    TASKS.find(options.evaluation.task)
    if options.warmup_steps > options.train.steps:
        raise ValueError(
            f"a warm-up of train.warmup={options.warmup_steps} steps is longer than the run of train.steps="
            f"{options.train.steps}, so the learning rate would never reach its highest value: give fewer steps, or a "
            "share of the run such as train.warmup=0.1"
        )
    if options.train.liger and not is_liger_kernel_available():
        raise ImportError("train.liger needs liger-kernel: pip install 'rope_patch[gpu]', or set train.liger=false")
    quantized = options.model.quantization != "none"
    if quantized and not torch.cuda.is_available() and options.evaluation.every:
        raise ValueError(
            "on a CPU bitsandbytes packs quantized weights anew when a model is first evaluated, and trains it wrongly "
            "after that: set evaluation.every=0, so that only the end is evaluated"
        )
    if quantized and options.train.liger:
        raise ValueError("train.liger replaces the MLPs that model.quantization would quantize: use one of the two")


def training_arguments(options: RecipeOptions, folder: Path) -> TrainingArguments:
    """Return transformers' arguments for these options.

    Raises:
        ValueError: transformers does not know the scheduler, or this machine does not support the precision.
    """
    train = options.train
    every = options.evaluation.every
    # Under LoRA the embeddings are frozen, so no input needs a gradient, which torch's reentrant variant requires.
    how = {"use_reentrant": False}
    checkpointing: dict[str, Any] = {_CHECKPOINTING: train.checkpointing, f"{_CHECKPOINTING}_kwargs": how}
    evaluation: dict[str, Any] = {"eval_strategy": "no"}
    if every:
        evaluation = {
            "eval_strategy": "steps",
            "eval_steps": every,
            "metric_for_best_model": "score",
            "greater_is_better": True,
            "load_best_model_at_end": True,
        }
    report_to = []
    if is_tensorboard_available():
        report_to.append("tensorboard")
    return TrainingArguments(
        str(folder),
        max_steps=train.steps,
        per_device_train_batch_size=train.batch,
        gradient_accumulation_steps=train.accumulate,
        learning_rate=train.learning_rate,
        lr_scheduler_type=train.scheduler,
        warmup_steps=options.warmup_steps,
        optim=OPTIMIZERS.get(train.optimizer, train.optimizer),
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        bf16=train.precision == "bfloat16",
        fp16=train.precision == "float16",
        **checkpointing,
        use_liger_kernel=train.liger,
        # Liger's fused loss and rotary kernel would replace ours; its norms and MLPs do not.
        liger_kernel_config={"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False},
        seed=train.seed,
        save_strategy="steps",
        save_steps=options.save_every,
        save_total_limit=train.keep,
        **evaluation,
        logging_steps=train.log_every,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # by default a NaN or infinite loss is logged as the mean of recent ones
        report_to=report_to,
        # All adapters take part in every step, so DDP need not search for weights without a gradient.
        ddp_find_unused_parameters=False,
        ddp_timeout=6 * 3600,  # seconds; the other processes wait while the first packs rows
        use_cpu=not torch.cuda.is_available(),
    )
