"""transformers' Trainer for long rows: no whole logits, weighted labels, data in the order given, the patch guarded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from rope_patch.checkpoints import RopePatchCallback
from rope_patch.sites import find_rotary
from rope_patch.training.collators import Collator
from rope_patch.training.loss import IGNORED, fuse


class LongTrainer(Trainer):
    """Train on rows of :func:`~rope_patch.training.data.pack`, under one of :mod:`~rope_patch.training.collators`.

    The loss is the mean over all labels of a step, accumulated passes and devices together, each counting its weight.
    Rows come in the order given, so that lengths can be scheduled and a resumed run sees what it would have seen. On a
    patched model every checkpoint carries the patch's record.

    Args:
        model: a causal language model, bare or under PEFT; its ``forward`` is fused in place.
        args: of transformers. ``remove_unused_columns`` and ``train_sampling_strategy`` are set here.
        rows: to train on.
        collator: gives rows their positions and masks.
        callbacks: further ones.
        **kwargs: as Trainer takes them.

    Raises:
        ValueError: no rows, or a row with no label.
    """

    def __init__(
        self,
        model: Any,
        args: TrainingArguments,
        rows: Sequence[dict[str, Any]],
        collator: Collator,
        *,
        callbacks: Sequence[Any] = (),
        **kwargs: Any,
    ) -> None:
        if not len(rows):
            raise ValueError("there is nothing to train on: no rows")
        args.remove_unused_columns = False
        args.train_sampling_strategy = "sequential"
        args.label_names = ["labels"]
        guards = [RopePatchCallback()] if find_rotary(model).record is not None else []
        super().__init__(
            fuse(model), args, train_dataset=rows, data_collator=collator, callbacks=[*guards, *callbacks], **kwargs
        )

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """What the summed loss of a step is divided by: the weights of its labels."""
        counts = [batch["weights"][:, 1:][batch["labels"][:, 1:] != IGNORED].sum() for batch in batch_samples]
        if not counts:
            return None
        total = torch.stack(counts).sum().to(device)
        if total == 0:
            raise ValueError("a step has no label to learn: longer rows or more of them are needed")
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            total = self.accelerator.gather(total).sum()
        return total
