"""What a model is asked to read: token ids that it knows, at the positions they have."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn


def check_ids(ids: Tensor, vocabulary: int | None = None) -> Tensor:
    """Return token ids as int64.

    Raises:
        ValueError: not whole numbers, or ids beyond a vocabulary of this size.
    """
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"token_ids must be whole numbers, got {ids.dtype}")
    if vocabulary is not None and ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= vocabulary):
        raise ValueError(
            f"token ids must be in [0, {vocabulary}), got {int(ids.min())} to {int(ids.max())}: "
            "is this the model's own tokenizer?"
        )
    return ids.long()


def token_rows(token_ids: Tensor) -> Tensor:
    """Return token ids as int64 rows: (rows, tokens).

    Raises:
        ValueError: not whole numbers, another shape, or fewer than 2 tokens.
    """
    ids = check_ids(token_ids)
    rows = ids[None] if ids.ndim == 1 else ids
    if rows.ndim != 2 or len(rows) < 1:
        raise ValueError(f"token_ids must be (tokens,) or (rows, tokens), got shape {tuple(token_ids.shape)}")
    if rows.shape[1] < 2:
        raise ValueError(f"a text must hold at least 2 tokens, got {rows.shape[1]}")
    return rows.cpu()


def text_digest(rows: Tensor) -> str:
    """Return 16 hex digits of token ids (rows, tokens)."""
    return hashlib.sha256(f"{tuple(rows.shape)}".encode() + rows.numpy().astype("<i8").tobytes()).hexdigest()[:16]


def refuse_prompts(model: nn.Module) -> None:
    """Raise if tokens of an adapter's own come before the text."""
    adapter: Any = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise ValueError("adapters that learn a prompt or prefix move every position: merge or drop the adapter")
