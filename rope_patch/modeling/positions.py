"""Positions of short rows that skip ahead, so that distances of a long context occur in them."""

from __future__ import annotations

import random

import torch
from torch import Tensor


def skipped_positions(rng: random.Random, size: int, target: int, chunks: int = 2) -> Tensor:
    """Return positions of a row that is cut into chunks, with skipped positions between them: (size,) [tokens].

    *Source*: Zhu et al. (2023), PoSE, arXiv:2309.10400, section 3: chunk lengths and skips drawn uniformly per example.

    Args:
        rng: source of the randomness.
        size: length of the row [tokens].
        target: length of the long context; every position is below it [tokens].
        chunks: number of chunks into which the row is cut.

    Raises:
        ValueError: the row is longer than the target, or has fewer tokens than chunks.

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
    # Each skip is counted from the beginning of the row, so they are sorted for positions to rise.
    skips = [0, *sorted(rng.randint(0, room) for _ in range(chunks - 1))]
    positions = torch.arange(size)
    for cut, skip in zip([0, *cuts], skips, strict=True):
        positions[cut:] = torch.arange(cut, size) + skip
    return positions


def random_positions(rng: random.Random, size: int, target: int) -> Tensor:
    """Return positions of a row that are drawn from a long context without repetition, in order: (size,) [tokens].

    *Source*: Ruoss et al. (2023), randomized positional encodings, arXiv:2305.16843, section 3.

    Args:
        rng: source of the randomness.
        size: length of the row [tokens].
        target: length of the long context; every position is below it [tokens].

    Raises:
        ValueError: the row is longer than the target.

    Example:
        >>> random_positions(random.Random(3), 4, 64).tolist()
        [16, 30, 47, 60]
    """
    if size > target:
        raise ValueError(f"a row of {size} tokens is longer than the target of {target}")
    return torch.tensor(sorted(rng.sample(range(target), size)))
