"""Measures how fast a model reads, which tells how long a command takes."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from rope_patch.evaluation.read_across_processes import reading_processes
from rope_patch.modeling.reader import Reader, losses
from rope_patch.modeling.temporary_modes import in_eval_mode
from rope_patch.runtime.parallel import from_first_process

SHORTEST_ROW = 128
"""Length of the first row that the speed is measured on [tokens]."""
MEASURING_SECONDS = 8.0
"""Approximate time spent on measuring the speed [s]; one row of the shortest length is read in any case."""


def speed(model: nn.Module, length: int, *, rows: int = 1, chunk: int | None = None) -> float:
    """Return how many tokens all processes read in a second.

    Args:
        model: the model that is measured.
        length: length of the longest row that will be read, whose tokens take the most time [tokens].
        rows: number of rows in a batch.
        chunk: length of a forward pass [tokens]; None for whole rows.
    """
    # The first process measures for all, because all have to plan the same work.
    measured: float = from_first_process(lambda: tokens_per_second(model, length, rows=rows, chunk=chunk))
    return measured * reading_processes(model)


@torch.no_grad()
def tokens_per_second(model: nn.Module, length: int, *, rows: int = 1, chunk: int | None = None) -> float:
    """Measure how many tokens a model reads in a second, on a short row and then on longer ones while time allows.

    For longer rows the speed is extrapolated by :func:`operations`.

    Args:
        model: a causal language model.
        length: length of the rows that will be read [tokens].
        rows: number of rows in a batch; a batch is tried only if a single row took little time.
        chunk: length of a forward pass [tokens]; None for that of :meth:`Reader.chunk`.
    """
    reader = Reader(model)
    if reader.dynamic:  # such a model reads whole rows, one at a time
        rows = 1
        chunk = None

    def seconds(count: int, size: int) -> float:
        ids = (torch.arange(count * size) % reader.vocabulary).view(count, size)
        started = time.perf_counter()
        # The result is on the CPU, so a GPU has finished.
        losses(reader, ids, [1] * count, chunk=reader.chunk(size, chunk))
        return time.perf_counter() - started

    with in_eval_mode(model):
        seconds(1, min(length, 16))  # the first call of a process is slower
        size = min(length, SHORTEST_ROW)
        spent = 0.0
        while True:
            elapsed = seconds(1, size)
            spent += elapsed
            # A row twice as long takes at least twice the time, and more because of attention.
            if size == length or spent + 2.5 * elapsed > MEASURING_SECONDS:
                break
            size = min(2 * size, length)
        # On a GPU several rows may take no longer than one, so a batch is timed if there is time for it.
        if size == length and rows > 1 and rows * elapsed < MEASURING_SECONDS:
            return rows * length / seconds(rows, length)
    return size / elapsed * operations(model, size) / operations(model, length)


def operations(model: nn.Module, length: int) -> float:
    """Return the mean number of multiplications for a token of a row: of the weights, and of full attention.

    Args:
        model: a causal language model.
        length: length of the row [tokens].
    """
    weights = sum(parameter.numel() for parameter in model.parameters())
    config: Any = model.config
    try:
        config = config.get_text_config()
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        head_dim = getattr(config, "head_dim", None)
        width = config.num_attention_heads * head_dim if head_dim else config.hidden_size
    except (AttributeError, RuntimeError, ValueError):  # layers of several shapes, or none: only the weights count
        return float(weights)
    bounded = ("sliding", "chunked", "linear", "mamba", "recurrent", "conv")
    full = sum(not kind.startswith(bounded) for kind in kinds)
    # A token attends to half of the row on average, with its query and again with the values.
    return float(weights + full * width * length)
