"""Collators: the positions that a row of tokens is given, and the masks that go with them.

Positions that do not rise by one start a new segment for transformers' packed attention when no mask is sent (see
``masking_utils``). So the collators that skip positions send an all-ones mask, which keeps plain causal attention, and
the one that separates documents sends none.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rope_patch.modeling.loss import IGNORED
from rope_patch.modeling.positions import skipped_positions

Example = Mapping[str, Any]
"""``ids``: tokens; ``index``: number of the example, which seeds all randomness; ``weights``: of each label in the
loss, or None where all are 1; ``starts``: where documents begin. The last two may be missing."""


@dataclass(frozen=True)
class Collator:
    """Rows with positions from 0, in which each token attends to all before it.

    Attributes:
        pad: id that fills short rows on the right; it is not predicted, and no token before it attends to it.
        seed: of the positions, together with the number of the example, so that they are the same in every run.
    """

    pad: int = 0
    seed: int = 0

    def __call__(self, examples: Sequence[Example | list[Any]]) -> dict[str, Any]:
        """Return ``input_ids``, ``labels``, ``weights``, ``position_ids`` and the mask: (rows, tokens) each.

        Args:
            examples: rows, or lists of rows.
        """
        return self._collate([row for item in examples for row in (item if isinstance(item, list) else [item])])

    def _collate(self, examples: Sequence[Any]) -> dict[str, Any]:
        width = max(len(example["ids"]) for example in examples)
        ids = torch.full((len(examples), width), self.pad)
        labels, weights = torch.full_like(ids, IGNORED), torch.zeros(ids.shape)
        positions = torch.zeros_like(ids)
        for i, example in enumerate(examples):
            size = len(example["ids"])
            ids[i, :size] = labels[i, :size] = torch.as_tensor(example["ids"])
            counts = example.get("weights")
            weights[i, :size] = torch.as_tensor(1.0 if counts is None else counts, dtype=torch.float32)
            row = self.positions(size, example)
            positions[i] = torch.cat([row, torch.arange(width - size) + (int(row[-1]) + 1 if size else 0)])
        labels[weights == 0] = IGNORED
        batch = {"input_ids": ids, "labels": labels, "weights": weights, "position_ids": positions}
        return batch | self.masks(ids, examples)

    def positions(self, size: int, example: Example) -> Tensor:
        """Return the positions of a row of ``size`` tokens: (size,)."""
        return torch.arange(size)

    def masks(self, ids: Tensor, examples: Sequence[Example]) -> dict[str, Any]:
        """Return a mask that keeps attention causal over the whole row, whatever the positions."""
        return {"attention_mask": torch.ones_like(ids)}


@dataclass(frozen=True)
class PackedCollator(Collator):
    """Documents packed into a row that do not attend to each other: positions start at 0 in each, and no mask is sent.

    Under flash attention transformers detects documents in single rows only: train with one row per pass.
    """

    def positions(self, size: int, example: Example) -> Tensor:
        """Return positions that count from the start of each document."""
        starts = torch.zeros(size, dtype=torch.long)
        for start in example.get("starts", (0,)):
            starts[start:] = start
        return torch.arange(size) - starts

    def masks(self, ids: Tensor, examples: Sequence[Example]) -> dict[str, Any]:
        """Return no mask: transformers reads the segments from the positions, but only where there is no cache."""
        return {"use_cache": False}


@dataclass(frozen=True)
class PoSECollator(Collator):
    """A short row cut into chunks, with positions skipped between them, so that distances up to the target occur.

    *Source*: Zhu et al. (2023), PoSE, arXiv:2309.10400; :func:`~rope_patch.modeling.positions.skipped_positions` says
    where ours differs.

    Attributes:
        target: positions go up to ``target - 1`` [tokens].
        chunks: pieces of a row.
    """

    target: int = 4096
    chunks: int = 2

    def positions(self, size: int, example: Example) -> Tensor:
        """Return rising positions with ``chunks - 1`` gaps.

        Raises:
            ValueError: a row longer than the target, or shorter than its chunks.
        """
        if size > self.target:
            raise ValueError(f"a row of {size} tokens is longer than the target of {self.target}")
        rng = random.Random(f"{self.seed}/{example['index']}")  # the same positions in every run
        return skipped_positions(rng, size, self.target, self.chunks)
