"""How long a model takes to read text, and how much it reads where no time is given."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from rope_patch.modeling.modes import in_eval_mode
from rope_patch.modeling.scoring import CacheFactory, Reader, losses

WORK = {"cpu": 1.2e13, "cuda": 1e16}
"""Parameters × tokens that a command reads by default, by device: 89k tokens with a model of 135M parameters on a CPU,
which takes two cores about seven minutes in bfloat16 (200 tokens a second), and 1.2M with one of 8B on a GPU."""

SHORTEST = 128
"""Shortest row that the pace is measured on [tokens]."""

MEASURING = 4.0
"""Time for measuring the pace, about; a single row of the shortest length is read in any case [s]."""

FAR, PATIENCE = 4, 4.0
"""Rows so many times shorter than the longest say little about it: measuring takes up to so many times as long then.
Noise hides what attention costs in short rows: 16k tokens were planned at a fifth of their time with rows of up to 512
tokens, and with rows of up to 2048 at 35 to 58 % of it."""

SAFETY = 0.85
"""Share of a time that is filled with what is known to be read."""


@dataclass(frozen=True)
class Pace:
    """How long a model takes for a token: ``fixed + growing × length`` of the row it stands in.

    Attributes:
        fixed: the part of all rows [s/token].
        growing: the part of attention [s/token²].
    """

    fixed: float
    growing: float = 0.0

    def seconds(self, tokens: float, length: int) -> float:
        """Return how long a number of tokens takes in rows of a length [s].

        >>> Pace(fixed=0.001, growing=1e-6).seconds(10_000, 2000)
        30.0
        """
        return tokens * (self.fixed + self.growing * length)

    def __add__(self, other: Pace) -> Pace:
        """Return the pace of reading everything in both ways."""
        return Pace(self.fixed + other.fixed, self.growing + other.growing)

    def __mul__(self, times: float) -> Pace:
        """Return the pace of reading everything so many times."""
        return Pace(times * self.fixed, times * self.growing)


def default_tokens(model: nn.Module) -> int:
    """Return how many tokens a long command reads with a model where no time is given: fewer the larger it is."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return int(WORK["cuda" if next(model.parameters()).is_cuda else "cpu"] / max(parameters, 1))


@torch.no_grad()
def pace_of_reading(
    model: nn.Module,
    length: int,
    *,
    rows: int = 1,
    chunk: int | None = None,
    cache: CacheFactory | None = None,
    seconds: float = MEASURING,
) -> Pace:
    """Measure how long a model takes to read and score rows of tokens, as perplexity does.

    Args:
        model: a causal language model.
        length: of the longest row that will be read [tokens].
        rows: that are read side by side.
        chunk: tokens per forward pass.
        cache: factory of a cache to read through.
        seconds: as for :func:`measure_pace`.
    """
    reader = Reader(model)

    def read(ids: torch.Tensor) -> int:
        losses(reader, ids % reader.vocabulary, [1] * len(ids), chunk=chunk, cache=cache)  # waits for a GPU
        return ids.numel()

    with in_eval_mode(model):
        if reader.dynamic:  # which reads whole rows one at a time; under a method it is frozen
            chunk = cache = None
            rows = 1
        return measure_pace(read, length, rows=rows, seconds=seconds)


def measure_pace(
    read: Callable[[torch.Tensor], int | None], length: int, *, rows: int = 1, seconds: float = MEASURING
) -> Pace:
    """Measure how long something takes with rows of tokens: with a short one, and ever longer ones while time allows.

    Args:
        read: called with ids (rows, tokens); returns how many tokens it read where these are not all.
        length: of the longest row [tokens].
        rows: that are read side by side; more than one are tried where a row of the whole length took little time.
        seconds: to measure for, about, and up to :data:`PATIENCE` times as long while the rows are :data:`FAR` times
            shorter than the longest; the cost of longer rows is extrapolated.
    """
    size, count, spent = min(length, SHORTEST), 1, 0.0
    read(_ids(1, min(size, 16)))  # the first call of a process is slower
    sizes: list[int] = []
    costs: list[float] = []  # of a token [s]
    batched = None
    while True:
        started = time.perf_counter()
        tokens = read(_ids(count, size)) or count * size
        took = time.perf_counter() - started
        spent += took
        if count > 1:
            batched = took / tokens
        else:
            sizes.append(size)
            costs.append(took / tokens)
        allowed = seconds * (PATIENCE if FAR * size <= length else 1.0)
        if spent + 2.5 * took > allowed or (size == length and count >= rows):
            break
        if size < length:
            size = min(2 * size, length)
        else:
            count = min(2 * count, rows)
    pace = _line(sizes, costs)
    return pace if batched is None else pace * (batched / pace.seconds(1, length))


def _line(sizes: list[int], costs: list[float]) -> Pace:
    """Return the line through the costs of a token; the longer rows count more, and it never falls."""
    growing = float(np.polyfit(sizes, costs, 1, w=sizes)[0]) if len(sizes) > 1 else 0.0
    growing = min(max(growing, 0.0), costs[-1] / sizes[-1])
    return Pace(costs[-1] - growing * sizes[-1], growing)


def _ids(rows: int, length: int) -> torch.Tensor:
    return torch.arange(rows * length).view(rows, length)


def duration_text(seconds: float) -> str:
    """Return a time for people.

    >>> duration_text(42), duration_text(500), duration_text(9000)
    ('42 s', '8 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def estimate_text(tokens: int, seconds: float | None, more: str = "", *, advice: str) -> str:
    """Return what a command says first: how much it will read, how long that takes, and what reads less.

    Args:
        tokens: to be read [tokens].
        seconds: that this takes; None where it was not measured [s].
        more: what may be read in addition.
        advice: how to read less; "" for nothing.

    >>> estimate_text(1234, 200, advice="--budget 10m aims at a time")
    'reads 1,234 tokens in about 3 min; --budget 10m aims at a time'
    """
    time = "" if seconds is None else f" in about {duration_text(seconds)}"
    return f"reads {tokens:,} tokens{time}{more}" + (f"; {advice}" if advice else "")
