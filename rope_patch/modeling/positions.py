"""Positions of short rows that skip ahead, so that distances of a long context occur in them."""

from __future__ import annotations

import random

import torch
from torch import Tensor


def skipped_positions(rng: random.Random, size: int, target: int, chunks: int = 2) -> Tensor:
    """Return the positions of a row that is cut into chunks, with positions skipped between them: (size,) [tokens].

    *Source*: Zhu et al. (2023), PoSE, arXiv:2309.10400, section 3: chunk lengths and skips drawn uniformly per example.

    Args:
        rng: source of the randomness.
        size: of the row [tokens].
        target: positions lie below it [tokens].
        chunks: pieces of the row.

    Raises:
        ValueError: a row longer than the target, or shorter than its chunks.

    Example:
        >>> skipped_positions(random.Random(3), 8, 64).tolist()
        [0, 1, 39, 40, 41, 42, 43, 44]
    """
    if size > target:
        raise ValueError(f"a row of {size} tokens is longer than the target of {target}")
    if size < chunks:
        raise ValueError(f"a row of {size} tokens cannot be cut into {chunks} chunks")
    room = target - size
    cuts = sorted(rng.sample(range(1, size), chunks - 1))
    skips = [0, *sorted(rng.randint(0, room) for _ in range(chunks - 1))]
    positions = torch.arange(size)
    for cut, skip in zip([0, *cuts], skips, strict=True):
        positions[cut:] = torch.arange(cut, size) + skip
    return positions
