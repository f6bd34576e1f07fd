"""Rows that several devices share: batches for context parallelism and Ulysses, and checks for what they cannot train.

Both cut a batch along the tokens. Context parallelism of accelerate (torch's, over FSDP2) drops every mask and attends
causally over the whole row, whatever the positions. DeepSpeed's Ulysses sends no mask either, but hands the positions
to attention kernels that may take a step other than one for the start of a document.

*Source*: accelerate 1.15 ``_attach_context_parallel_hooks``; transformers 5.23 ``deepspeed_sp_compute_loss``; DeepSpeed
``UlyssesSPDataLoaderAdapter`` and ``UlyssesSPAttentionHF``. Both need GPUs, so only the batches are tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rope_patch.modeling.loss import IGNORED
from rope_patch.training.collators import Collator, Example


@dataclass(frozen=True)
class ShardedCollator:
    """A collator whose batches can be cut along the tokens.

    Labels are shifted before the cut, since the last state of a shard predicts the first token of the next. Rows are
    padded on the right to a multiple of the number of pieces.

    Attributes:
        collator: makes the batches.
        cp_size: devices that share a row under context parallelism.
        sp_size: devices that share a row under Ulysses.
    """

    collator: Collator
    cp_size: int = 1
    sp_size: int = 1

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        """Return a batch to be cut.

        Under context parallelism ``shift_labels`` and ``shift_weights`` are added. DeepSpeed shifts the labels itself
        and knows no weights.

        Raises:
            ValueError: a batch whose positions, weights or masks would be ignored.
        """
        batch = self.collator(examples)
        if self.sp_size > 1:
            _check_ulysses(batch)
            return self._padded({name: batch[name] for name in ("input_ids", "labels", "position_ids")}, self.sp_size)
        if "attention_mask" not in batch:
            raise ValueError(
                f"{type(self.collator).__name__} keeps documents apart by their positions, which context parallelism "
                "ignores: use another collator, or cp_size 1"
            )
        batch = self._padded(batch, 2 * self.cp_size)  # torch gives each device a piece from either end
        weights = batch.pop("weights")
        batch["shift_labels"] = pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:].contiguous()
        batch["shift_weights"] = pad(weights, (0, 1))[:, 1:].contiguous()
        return batch

    def _padded(self, batch: dict[str, Any], multiple: int) -> dict[str, Any]:
        extra = -batch["input_ids"].shape[1] % multiple
        fill = {"input_ids": self.collator.pad, "labels": IGNORED, "attention_mask": 1}
        padded = {name: pad(tensor, (0, extra), value=fill.get(name, 0)) for name, tensor in batch.items()}
        if extra:
            padded["position_ids"][:, -extra:] = batch["position_ids"][:, -1:] + torch.arange(1, extra + 1)
        return padded


def _check_ulysses(batch: dict[str, Any]) -> None:
    if bool((batch["position_ids"].diff() != 1).any()):
        raise ValueError(
            "positions must rise by one under Ulysses, whose attention may read a skip as the start of a document that "
            "attends to nothing before it: use Collator, or context parallelism for PoSE and random positions"
        )
    if bool((batch["weights"][batch["labels"] != IGNORED] != 1).any()):
        raise ValueError("labels have weights, which Ulysses ignores: leave the weights out, or use cp_size")


def check_windows(config: Any, sp_size: int) -> None:
    """Refuse a model with sliding windows: shards are attended to without a mask, so the windows would be ignored.

    Flash attention gets the window as a number, and keeps it under Ulysses.

    Raises:
        ValueError: a model with sliding windows.
    """
    text = config.get_text_config()
    if sp_size > 1 and "flash" in str(getattr(text, "_attn_implementation", "")):
        return
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * bool(getattr(text, "sliding_window", None))
    windowed = sorted({str(kind) for kind in kinds} - {"full_attention"})
    if windowed:
        raise ValueError(
            f"rows that devices share are attended to in full, and this model has layers of {', '.join(windowed)}: "
            "train on rows that one device holds (cp_size 1, sp_size 1)"
        )


def weight_of(batch: dict[str, Any]) -> Tensor:
    """Return the summed weights of the labels of a batch, cut or whole."""
    if "shift_labels" in batch:
        labels, weights = batch["shift_labels"], batch["shift_weights"]
    else:
        labels, weights = batch["labels"][:, 1:], batch["weights"][:, 1:]
    total: Tensor = weights[labels != IGNORED].sum()
    return total
