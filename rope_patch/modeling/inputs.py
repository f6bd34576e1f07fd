"""Checks of what a model is given to read: token ids that it knows, at the positions that they have."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn


def check_ids(ids: Tensor, vocabulary: int | None = None) -> Tensor:
    """Return token ids as int64.

    Args:
        ids: token ids of any shape.
        vocabulary: number of tokens that the model knows; without it the range of the ids is not checked.

    Raises:
        ValueError: the ids are not whole numbers, or lie beyond the vocabulary.
    """
    # An id that is out of range ends a process on a GPU with an error that names no cause.
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"token_ids must be whole numbers, got {ids.dtype}")
    if vocabulary is not None and ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= vocabulary):
        raise ValueError(
            f"token ids must be in [0, {vocabulary}), got {int(ids.min())} to {int(ids.max())}: "
            "is this the model's own tokenizer?"
        )
    return ids.long()


def token_rows(token_ids: Tensor) -> Tensor:
    """Return token ids as int64 rows: (rows, tokens).

    Args:
        token_ids: (tokens,) or (rows, tokens) token ids.

    Raises:
        ValueError: the ids are not whole numbers, have another shape, or are fewer than 2 tokens in a row.
    """
    ids = check_ids(token_ids)
    rows = ids[None] if ids.ndim == 1 else ids
    if rows.ndim != 2 or len(rows) < 1:
        raise ValueError(f"token_ids must be (tokens,) or (rows, tokens), got shape {tuple(token_ids.shape)}")
    if rows.shape[1] < 2:
        raise ValueError(f"a text must hold at least 2 tokens, got {rows.shape[1]}")
    return rows.cpu()


def tensor_hash(values: Tensor) -> str:
    """Return the SHA-256 of token ids, or of other numbers."""
    return hashlib.sha256(values.cpu().contiguous().numpy().data).hexdigest()


def refuse_prompts(model: nn.Module) -> None:
    """Raise ValueError if an adapter puts tokens of its own before the text."""
    adapter: Any = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise ValueError("adapters that learn a prompt or prefix move every position: merge or drop the adapter")
