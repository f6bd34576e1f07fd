"""transformers' Trainer for long rows, and its arguments: sliced loss, rows in order, patch records in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.integrations.integration_utils import is_tensorboard_available
from transformers.utils.import_utils import is_liger_kernel_available

from rope_patch.checkpoints.callback import RopePatchCallback
from rope_patch.evaluation.tasks import TASKS
from rope_patch.methods import as_method
from rope_patch.modeling.training_loss import fuse
from rope_patch.options.finetune import RecipeOptions
from rope_patch.patching.locate import locate

_CHECKPOINTING = next(
    name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, name)
)  # newer releases have the first name


class LongTrainer(Trainer):
    """Train on rows of :mod:`~rope_patch.training.pack_rows`, read in the order given.

    On a patched model every checkpoint has the patch's record.

    Args:
        model: a causal language model, bare or under PEFT; its ``forward`` is fused in place.
        args: the arguments of transformers; those that decide how rows are read are set here.
        rows: the rows to train on.
        evaluator: a function of the model that is called where transformers would evaluate; it returns numbers by name,
            which are logged with the prefix ``eval_`` and choose the best checkpoint; None if nothing is evaluated.

    Raises:
        ValueError: one process has several GPUs, or the rows cannot be shared among GPUs.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        rows: Any,
        *,
        evaluator: Any = None,
    ) -> None:
        if args.n_gpu > 1:
            raise ValueError(
                f"one process would use {args.n_gpu} GPUs: start one for each with accelerate launch or torchrun, "
                "or show it one with CUDA_VISIBLE_DEVICES=0"
            )
        # Trainer would drop columns that `forward` does not name; every column of a row is for the model.
        args.remove_unused_columns = False
        # A resumed run skips as many rows as it has read, so their order must be that of the file.
        args.train_sampling_strategy = "sequential"
        args.label_names = ["labels"]
        self.evaluator = evaluator
        super().__init__(
            fuse(model),
            args,
            train_dataset=rows,
            eval_dataset=rows if evaluator else None,  # transformers requires one; the evaluator has its own texts
        )
        if locate(model).record is not None:
            self.add_callback(RopePatchCallback())
        if self.get_cp_size() > 1:
            check_shareable(model.config, rows[0])

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run one forward and backward pass.

        Raises:
            FloatingPointError: the loss is NaN or infinite, and all later losses would be.
        """
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"the loss of step {self.state.global_step + 1} is {float(loss)}: use a lower learning rate, or "
                "more warm-up steps; earlier checkpoints are kept"
            )
        return loss

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return what the evaluator measures, and log it."""
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in self.evaluator(self.model).items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Return the number of a step's labels as a Python number: FSDP2 would round a tensor to its own precision."""
        count = super()._get_num_items_in_batch(batch_samples, device)
        return None if count is None else float(count)


def check_shareable(config: Any, row: Any) -> None:
    """Refuse rows and models that context parallelism would train wrongly.

    Context parallelism drops every mask and attends causally over the whole row, whatever the positions are (accelerate
    1.15, ``_attach_context_parallel_hooks``).

    Raises:
        ValueError: documents of a row are kept apart, or the model has sliding windows.
    """
    # Rows have a mask of ones exactly where documents are joined (see pack_rows.packed_rows).
    if "attention_mask" not in row:
        raise ValueError("context parallelism joins documents: set data.boundaries=join, or cp_size 1")
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds - {"full_attention"} or (not kinds and getattr(text, "sliding_window", None)):
        raise ValueError(
            "rows that devices share are attended to in full, and this model has sliding windows: train on rows that "
            "one device holds (cp_size 1)"
        )


def check_training(options: RecipeOptions) -> None:
    """Refuse unknown names, a warm-up without end, and quantized weights that Liger would replace.

    Raises:
        ImportError: ``train.liger`` is set, and its package is missing.
        ValueError: the method or task is unknown, the warm-up is longer than the run, or quantized weights would be
            trained through Liger.
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
    if options.model.quantization != "none" and options.train.liger:
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
    evaluation: dict[str, Any] = {}
    if every:
        evaluation = {
            "eval_strategy": "steps",
            "eval_steps": every,
            "metric_for_best_model": "score",
            "greater_is_better": True,
            "load_best_model_at_end": True,
        }
    optimizer = train.optimizer
    if optimizer == "adamw":
        optimizer = "adamw_torch"
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
        optim=optimizer,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        bf16=train.precision == "bfloat16",
        fp16=train.precision == "float16",
        **checkpointing,
        use_liger_kernel=train.liger,
        # Liger's fused loss and rotary kernel would replace ours; its norms and MLPs do not.
        liger_kernel_config={"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False},
        seed=train.seed,
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
        use_cpu=not torch.accelerator.is_available(),
    )
