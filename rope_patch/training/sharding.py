"""Rows that several devices share under context parallelism: their batches, and what cannot be trained so.

accelerate's context parallelism (torch's, over FSDP2) cuts a batch along the tokens, drops every mask, and attends
causally over the whole row, whatever the positions.

*Source*: accelerate 1.15 ``_attach_context_parallel_hooks``. It needs several GPUs, so only the batches are tested.
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
        cp_size: devices that share a row.
    """

    collator: Collator
    cp_size: int = 1

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        """Return a batch to be cut, with ``shift_labels`` and ``shift_weights``.

        Raises:
            ValueError: a batch whose masks would be ignored.
        """
        batch = self.collator(examples)
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


def check_windows(config: Any) -> None:
    """Refuse a model with sliding windows: shards are attended to without a mask, so the windows would be ignored.

    Raises:
        ValueError: a model with sliding windows.
    """
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * bool(getattr(text, "sliding_window", None))
    windowed = sorted({str(kind) for kind in kinds} - {"full_attention"})
    if windowed:
        raise ValueError(
            f"rows that devices share are attended to in full, and this model has layers of {', '.join(windowed)}: "
            "train on rows that one device holds (cp_size 1)"
        )


def weight_of(batch: dict[str, Any]) -> Tensor:
    """Return the summed weights of the labels of a batch, cut or whole."""
    if "shift_labels" in batch:
        labels, weights = batch["shift_labels"], batch["shift_weights"]
    else:
        labels, weights = batch["labels"][:, 1:], batch["weights"][:, 1:]
    total: Tensor = weights[labels != IGNORED].sum()
    return total
