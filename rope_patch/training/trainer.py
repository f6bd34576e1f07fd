"""transformers' Trainer for long rows: loss from slices of the logits, weighted labels, fixed order, patch records."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import TrainingArguments

from rope_patch.checkpoints.adapters import RopePatchCallback
from rope_patch.modeling.loss import fuse
from rope_patch.patching.locate import find_rotary
from rope_patch.training.advice import GIB, oom_advice
from rope_patch.training.collators import Collator
from rope_patch.training.resuming import WholeCheckpoints
from rope_patch.training.sharding import ShardedCollator, check_windows, weight_of
from rope_patch.training.tables import TableTraining


class LongTrainer(WholeCheckpoints):
    """Train on rows of :func:`~rope_patch.training.data.pack`, under one of :mod:`~rope_patch.training.collators`.

    The loss is the mean over all labels of a step, accumulated passes and devices together, each counting its weight.
    Rows are read in the order given, so that lengths can be scheduled and a resumed run reads the rows it would have
    read. On a patched model every checkpoint has the patch's record. A checkpoint appears only when it is complete.

    Args:
        model: a causal language model, bare or under PEFT; its ``forward`` is fused in place.
        args: of transformers. ``remove_unused_columns`` and ``train_sampling_strategy`` are set here.
        rows: to train on, a sequence; an item is a row or a list of rows.
        collator: gives rows their positions and masks.
        table: trains the model's rotary table together with the weights.
        evaluator: called with model and step where transformers would evaluate; returns numbers by name, which are
            logged with the prefix ``eval_`` and choose the best checkpoint.
        callbacks: further callbacks.
        **kwargs: as Trainer takes them.

    Raises:
        ValueError: no rows, or a row with no label.
    """

    _running: torch.Size | None = None  # (rows, tokens) of the current pass

    def __init__(
        self,
        model: Any,
        args: TrainingArguments,
        rows: Any,
        collator: Collator,
        *,
        table: TableTraining | None = None,
        evaluator: Callable[[Any, int], dict[str, float]] | None = None,
        callbacks: Sequence[Any] = (),
        **kwargs: Any,
    ) -> None:
        if not len(rows):
            raise ValueError("there is nothing to train on: no rows")
        args.remove_unused_columns = False
        args.train_sampling_strategy = "sequential"
        args.label_names = ["labels"]
        guards = [table or RopePatchCallback()] if find_rotary(model).record is not None else []
        self.table, self.evaluator = table, evaluator
        if evaluator is not None:
            kwargs["eval_dataset"] = rows  # transformers requires one; the evaluator has its own texts and prompts
        super().__init__(
            fuse(model), args, train_dataset=rows, data_collator=collator, callbacks=[*guards, *callbacks], **kwargs
        )
        if self.args.n_gpu > 1:
            raise ValueError(
                f"one process would use {self.args.n_gpu} GPUs: start one for each with accelerate launch or torchrun, "
                "or show it one with CUDA_VISIBLE_DEVICES=0"
            )
        cp_size, sp_size = self.get_cp_size(), self.get_sp_size()
        if cp_size > 1 or sp_size > 1:
            check_windows(model.config, sp_size)
            self.data_collator = ShardedCollator(collator, cp_size, sp_size)
            self.data_collator([rows[0]])  # raises before any training where rows cannot be split

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, as :meth:`WholeCheckpoints.train` does.

        Raises:
            torch.OutOfMemoryError: with the memory that a plan predicts for the step, and what to change.
        """
        self._running = None
        try:
            with contextlib.nullcontext() if self.table is None else self.table.in_place():
                return super().train(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            if self._running is None:  # during an evaluation, which the plan of a step does not cover
                raise
            batch, shared = self._running, self.get_sp_size()  # under Ulysses each device is given its own tokens
            cuda = self.args.device.type == "cuda"
            room = torch.cuda.get_device_properties(self.args.device).total_memory / GIB if cuda else None
            advice = oom_advice(self.model, self.args, batch[1] * shared, room, batch=batch[0])
            raise torch.OutOfMemoryError(f"{error}\n{advice}") from error

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run one forward and backward pass; its shape is kept for the advice if memory runs out.

        Raises:
            FloatingPointError: the loss is NaN or infinite, and every later one would be.
        """
        self._running = inputs["input_ids"].shape
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"the loss of step {self.state.global_step + 1} is {float(loss)}: use a lower learning rate, or "
                "more warm-up steps; earlier checkpoints are kept"
            )
        return loss

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Return transformers' optimizer; a trained table has its own parameter group."""
        new = self.optimizer is None
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if new and self.table is not None:
            self.table.add_group(optimizer)
        return optimizer

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.table is not None:
            self.table.load(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        best = self.state.best_model_checkpoint
        if self.table is not None and best is not None:
            self.table.load(best)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return what the evaluator measures, and log it; without one evaluate as transformers does."""
        self._running = None
        if self.evaluator is None:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        with contextlib.nullcontext() if self.table is None else self.table.as_patch():
            scores = self.evaluator(self.model, self.state.global_step)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in scores.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Return the divisor of a step's summed loss: the weights of its labels, over all devices."""
        if self.get_sp_size() > 1 or not batch_samples:
            return None  # under Ulysses transformers computes its own mean
        total = torch.stack([weight_of(batch) for batch in batch_samples]).sum().to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            total = self.accelerator.gather(total).sum() / self.get_tp_size()
        # After the gathering, so that a device whose own rows have no label does not leave the others waiting. A number
        # and no tensor, which FSDP2 would round to the precision it computes in.
        number = float(total) / self.get_cp_size()  # devices that share a row have all counted it
        if number == 0:
            raise ValueError("a step has no label to learn: give longer rows, or more of them")
        return number

    def _prepare_context_parallel_inputs(self, model: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Cut the weights where transformers cuts the labels."""
        context: Any
        context, inputs = super()._prepare_context_parallel_inputs(model, inputs)
        if "shift_weights" in inputs:
            context.keywords["buffers"].append(inputs["shift_weights"])
            context.keywords["buffer_seq_dims"].append(1)
            context.keywords["no_restore_buffers"].add(inputs["shift_weights"])
        return context, inputs
