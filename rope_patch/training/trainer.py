"""transformers' Trainer for long rows: loss from slices of the logits, weighted labels, fixed order, patch records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from rope_patch.checkpoints.adapters import RopePatchCallback
from rope_patch.modeling.loss import fuse
from rope_patch.patching.locate import locate
from rope_patch.training.collators import Collator
from rope_patch.training.sharding import ShardedCollator, check_windows, weight_of


class LongTrainer(Trainer):
    """Train on rows of :func:`~rope_patch.training.data.pack`, under one of :mod:`~rope_patch.training.collators`.

    The loss is the mean over all labels of a step, accumulated passes and devices together, each counting its weight.
    Rows are read in the order given, so that lengths can be scheduled and a resumed run reads the rows it would have
    read. On a patched model every checkpoint has the patch's record.

    Args:
        model: a causal language model, bare or under PEFT; its ``forward`` is fused in place.
        args: the arguments of transformers. ``remove_unused_columns`` and ``train_sampling_strategy`` are set here.
        rows: the rows to train on, a sequence; an item is a row or a list of rows.
        collator: gives rows their positions and masks.
        evaluator: called with model and step where transformers would evaluate; returns numbers by name, which are
            logged with the prefix ``eval_`` and choose the best checkpoint.
        callbacks: further callbacks.
        **kwargs: further arguments of Trainer.

    Raises:
        ValueError: no rows, or a row with no label.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        rows: Any,
        collator: Collator,
        *,
        evaluator: Callable[[Any, int], dict[str, float]] | None = None,
        callbacks: Sequence[Any] = (),
        **kwargs: Any,
    ) -> None:
        if not len(rows):
            raise ValueError("there is nothing to train on: no rows")
        args.remove_unused_columns = False
        args.train_sampling_strategy = "sequential"
        args.label_names = ["labels"]
        self.guard = RopePatchCallback() if locate(model).record is not None else None
        self.evaluator = evaluator
        if evaluator is not None:
            kwargs["eval_dataset"] = rows  # transformers requires one; the evaluator has its own texts and prompts
        callbacks = [*([self.guard] if self.guard else []), *callbacks]
        super().__init__(fuse(model), args, train_dataset=rows, data_collator=collator, callbacks=callbacks, **kwargs)
        if self.args.n_gpu > 1:
            raise ValueError(
                f"one process would use {self.args.n_gpu} GPUs: start one for each with accelerate launch or torchrun, "
                "or show it one with CUDA_VISIBLE_DEVICES=0"
            )
        if self.get_sp_size() > 1:
            raise ValueError("rows shared under DeepSpeed's Ulysses ignore weights: use context parallelism (cp_size)")
        if self.get_cp_size() > 1:
            check_windows(model.config)
            self.data_collator = ShardedCollator(collator, self.get_cp_size())
            self.data_collator([rows[0]])  # raises before any training where rows cannot be split

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run one forward and backward pass.

        Raises:
            FloatingPointError: the loss is NaN or infinite, and every later one would be.
        """
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"the loss of step {self.state.global_step + 1} is {float(loss)}: use a lower learning rate, or "
                "more warm-up steps; earlier checkpoints are kept"
            )
        return loss

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, and before its weights the patch's record: a kill leaves no adapter without its record."""
        if self.guard is not None and self.args.should_save:
            folder = Path(output_dir or str(self.args.output_dir))
            folder.mkdir(parents=True, exist_ok=True)
            self.guard.put_beside(self.model, folder)
        super().save_model(output_dir, _internal_call)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return what the evaluator measures, and log it; without one evaluate as transformers does."""
        if self.evaluator is None:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        scores = self.evaluator(self.model, self.state.global_step)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in scores.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Return the divisor of a step's summed loss: the weights of its labels, over all devices."""
        if not batch_samples:
            return None
        total = torch.stack([weight_of(batch) for batch in batch_samples]).sum().to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            total = self.accelerator.gather(total).sum() / self.get_tp_size()
        # After the gathering, so that a device whose own rows have no label does not leave the others waiting. A number
        # and no tensor, which FSDP2 would round to the precision it computes in.
        number = float(total) / self.get_cp_size()  # devices that share a row have all counted it
        if number == 0:
            raise ValueError("a step has no label to learn: give longer rows, or more of them")
        return number

    def _prepare_context_parallel_inputs(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Cut the weights where transformers cuts the labels."""
        context: Any
        context, inputs = super()._prepare_context_parallel_inputs(model, inputs)
        if "shift_weights" in inputs:
            context.keywords["buffers"].append(inputs["shift_weights"])
            context.keywords["buffer_seq_dims"].append(1)
            context.keywords["no_restore_buffers"].add(inputs["shift_weights"])
        return context, inputs
