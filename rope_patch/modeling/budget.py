"""How much text a model can read in a given time, and how much it reads where no time is given."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from rope_patch.modeling.modes import in_eval_mode
from rope_patch.modeling.scoring import Reader

WORK = {"cpu": 1.2e13, "cuda": 1e16}
"""Parameters × tokens that a command reads by default, by device: 89k tokens with a model of 135M parameters on a CPU,
which takes two cores about seven minutes in bfloat16 (200 tokens a second), and 1.2M with one of 8B on a GPU."""

LENGTH = 2048
"""Longest row that the speed is measured on [tokens]."""

SAFETY = 0.6
"""Share of the measured speed that a time is filled at: longer texts and the statistics of heads take more a token."""


def default_tokens(model: nn.Module) -> int:
    """Return how many tokens a long command reads with a model where no time is given: fewer the larger it is."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return int(WORK["cuda" if next(model.parameters()).is_cuda else "cpu"] / max(parameters, 1))


@torch.no_grad()
def tokens_per_second(model: nn.Module, length: int, seconds: float = 0.3) -> float:
    """Measure how fast a model reads a text of a length; a longer one takes more for each token.

    Args:
        model: a causal language model.
        length: of the text, at most 2048 and the context of the model [tokens].
        seconds: to read for, at least one row.
    """
    reader = Reader(model)
    ids = torch.arange(max(2, min(length, LENGTH, _context(model))))[None] % reader.vocabulary
    with in_eval_mode(model):
        _read(reader, ids[:, :16])  # the first call of a process is slower
        rows, started = 0, time.perf_counter()
        while rows == 0 or (time.perf_counter() - started < seconds and rows < 50):
            _read(reader, ids)
            rows += 1
        elapsed = time.perf_counter() - started
    return rows * ids.numel() / elapsed


def _context(model: Any) -> int:
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", LENGTH))


def _read(reader: Reader, ids: torch.Tensor) -> None:
    for _, hidden in reader.read(ids):
        hidden.sum().item()  # waits for a GPU


def duration_text(seconds: float) -> str:
    """Return a time for people.

    >>> duration_text(42), duration_text(500), duration_text(9000)
    ('42 s', '8 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
