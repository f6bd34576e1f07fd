"""transformers' Trainer for long rows: loss from slices of the logits, rows in order, patch records in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from rope_patch.checkpoints.callback import RopePatchCallback
from rope_patch.modeling.training_loss import fuse
from rope_patch.patching.locate import locate


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
        self.guard = None
        callbacks: list[Any] = []
        if locate(model).record is not None:
            self.guard = RopePatchCallback()
            callbacks.append(self.guard)
        self.evaluator = evaluator
        super().__init__(
            fuse(model),
            args,
            train_dataset=rows,
            eval_dataset=rows if evaluator else None,  # transformers requires one; the evaluator has its own texts
            callbacks=callbacks,
        )
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

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the patch's record and then the model, so that a kill leaves no adapter without its record."""
        if self.guard is not None and self.args.should_save:
            folder = Path(output_dir or str(self.args.output_dir))
            folder.mkdir(parents=True, exist_ok=True)
            self.guard.put_beside(self.model, folder)
        super().save_model(output_dir, _internal_call)

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
    # Rows have a mask of ones exactly where documents are joined (see pack_rows._masked).
    if "attention_mask" not in row:
        raise ValueError("context parallelism joins documents: set data.boundaries=join, or cp_size 1")
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds - {"full_attention"} or (not kinds and getattr(text, "sliding_window", None)):
        raise ValueError(
            "rows that devices share are attended to in full, and this model has sliding windows: train on rows that "
            "one device holds (cp_size 1)"
        )
