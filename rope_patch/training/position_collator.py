"""Positions of training rows that skip ahead, added to the batches of any collator."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rope_patch.modeling.positions import random_positions, skipped_positions


@dataclass
class PositionCollator:
    """Make batches as another collator does, and add positions up to a long context to every row.

    TRL's own collator drops ``position_ids`` of the rows in silence. The attention mask of the other collator must stay
    in the batch: without one transformers takes a skip of the positions for the start of another document.

    Attributes:
        collator: the collator that makes the batches, such as TRL's ``DataCollatorForLanguageModeling``.
        target_length: the length of the long context; every position is below it [tokens].
        kind: ``"pose"`` cuts a row into chunks and skips between them, ``"randpos"`` draws every position.
        chunks: the number of chunks of a row under ``"pose"``.
        seed: the seed of the positions. Those of a row depend on it and on the tokens of the row alone, so that a run
            that is resumed draws the same.

    Raises:
        ValueError: a row is longer than the target, or the batch has no attention mask.

    Example:
        >>> rows = [{"input_ids": torch.tensor([5, 6, 7, 8]), "attention_mask": torch.ones(4, dtype=torch.long)}]
        >>> batch = PositionCollator(torch.utils.data.default_collate, target_length=64)(rows)
        >>> batch["position_ids"].shape, bool((batch["position_ids"].diff() > 0).all())
        (torch.Size([1, 4]), True)
    """

    collator: Callable[[Sequence[Any]], dict[str, Any]]
    target_length: int
    kind: str = "pose"
    chunks: int = 2
    seed: int = 0

    def __call__(self, rows: Sequence[Any]) -> dict[str, Any]:
        """Return a batch with ``position_ids``: (rows, tokens) [tokens]."""
        batch = self.collator(rows)
        if "attention_mask" not in batch:
            raise ValueError("positions that skip ahead need an attention mask: set padding_free=False")
        batch["position_ids"] = torch.stack([self._positions(ids) for ids in batch["input_ids"]])
        return batch

    def _positions(self, ids: Tensor) -> Tensor:
        digest = hashlib.sha256(ids.to(torch.int64).numpy().tobytes()).hexdigest()
        rng = random.Random(f"{self.seed}/{digest}")
        if self.kind == "randpos":
            return random_positions(rng, len(ids), self.target_length)
        # The last row of the packed documents may be short.
        return skipped_positions(rng, len(ids), self.target_length, min(self.chunks, len(ids)))
