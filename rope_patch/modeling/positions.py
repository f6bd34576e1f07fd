"""Positions of short rows that skip ahead, so that distances of a long context occur in them."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from rope_patch.words import did_you_mean

POSITIONS = ("full", "pose")
"""The positions of rows that a table is fitted to: all of them, or those of short rows that skip ahead."""
CHUNKS = 2
"""Pieces of a row that skips positions, by default."""


def skipped_positions(rng: random.Random, size: int, target: int, chunks: int = 2, *, offset: bool = False) -> Tensor:
    """Return the positions of a row that is cut into chunks, with positions skipped between them: (size,) [tokens].

    *Source*: Zhu et al. (2023), PoSE, arXiv:2309.10400, section 3: chunk lengths and skips drawn uniformly per example.
    Ours starts the first chunk at a random position too when ``offset`` is set; theirs starts at 0.

    Args:
        rng: source of the randomness.
        size: of the row [tokens].
        target: positions lie below it [tokens].
        chunks: pieces of the row.
        offset: let the first chunk start anywhere.

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
    skips = sorted(rng.randint(0, room) for _ in range(chunks if offset else chunks - 1))
    if not offset:
        skips = [0, *skips]
    positions = torch.arange(size)
    for cut, skip in zip([0, *cuts], skips, strict=True):
        positions[cut:] = torch.arange(cut, size) + skip
    return positions


def check_positions(positions: str, row_length: int | None, chunks: int, target: int | None = None) -> None:
    """Raise where these options of a fit exclude each other.

    Args:
        positions: one of ``POSITIONS``.
        row_length: of rows that skip positions; None for the default [tokens].
        chunks: pieces of such rows.
        target: that positions stay below, where it is known [tokens].

    Raises:
        ValueError: unknown positions, a length or chunks for rows that skip none, too few chunks, or rows that are
            shorter than their chunks or longer than the target.
    """
    if positions not in POSITIONS:
        hint = did_you_mean(positions, POSITIONS)
        raise ValueError(f"unknown positions {positions!r}.{hint} Known: {', '.join(POSITIONS)}")
    if positions == "full":
        for name, given in (("row_length", row_length is not None), ("chunks", chunks != CHUNKS)):
            if given:
                raise ValueError(f"{name} is for rows that skip positions: set positions to pose, or leave it out")
    if chunks < 2:
        raise ValueError(f"chunks must be >= 2, got {chunks}")
    if row_length is not None and row_length < chunks:
        raise ValueError(f"row_length must be >= {chunks}, a token for each chunk, got {row_length}")
    if row_length is not None and target is not None and row_length > target:
        raise ValueError(f"row_length must be <= {target}, the target length, got {row_length}")
