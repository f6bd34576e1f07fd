"""How many tokens a command reads where it may read less: as many as suit the size of the model, or fit into a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from rope_patch.evaluation.batches import ways
from rope_patch.evaluation.key_tokens import tokens_of_spec
from rope_patch.evaluation.spec import SCALABLE, cost_of, smallest, tokens_computed, tokens_to_read, within
from rope_patch.evaluation.suite import EvalSuite
from rope_patch.modeling.modes import in_eval_mode
from rope_patch.modeling.scoring import Reader, fingerprint, losses
from rope_patch.options.evaluation import EvalSpec
from rope_patch.patching.verify import trained_length
from rope_patch.runtime.finished import ResultCache, key
from rope_patch.runtime.parallel import from_first

DEFAULT_WORK = {"cpu": 1.2e13, "cuda": 1e16}
"""Parameters × tokens that a command reads by default, by device: 89k tokens with a model of 135M parameters on a CPU,
which takes two cores about seven minutes in bfloat16 (200 tokens a second), and 1.2M with one of 8B on a GPU."""
SHORTEST_ROW = 128
"""Shortest row that the speed is measured on [tokens]."""
MEASURING_SECONDS = 8.0
"""Time for measuring the speed, about; a single row of the shortest length is read in any case [s]."""
FILLED_SHARE = 0.85
"""Share of a time that is filled with what is known to be read."""


def default_tokens(model: nn.Module) -> int:
    """Return how many tokens a long command reads with a model where no time is given: fewer the larger it is."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return int(DEFAULT_WORK["cuda" if next(model.parameters()).is_cuda else "cpu"] / max(parameters, 1))


def suite_within(
    suite: EvalSuite,
    most: float,
    scalable: Collection[str] = SCALABLE,
    cost: Callable[[EvalSpec], float] = tokens_to_read,
) -> tuple[EvalSuite, str]:
    """Return a suite that costs no more than is allowed, and what is lost with it, as a sentence; "" where nothing is.

    Args:
        suite: what is measured with time enough.
        most: at most, in the unit of the cost; tokens by default.
        scalable: fields of the spec that may be lowered.
        cost: of a spec with as many windows as the text has room for.

    Raises:
        ValueError: even the smallest spec costs more.
    """
    whole = replace(suite.spec, windows=len(suite.windows))
    smaller = within(whole, most, scalable, cost)
    return (suite, "") if smaller == whole else (EvalSuite(smaller, suite.tokenizer), cost_of(whole, smaller))


def comparison_within(
    suite: EvalSuite,
    model: nn.Module,
    methods: int,
    seconds: float | None,
    finished: Path,
    chosen: Collection[str] = (),
) -> tuple[EvalSuite, str]:
    """Return a suite with which a comparison fits into a time or suits the size of the model, and what is lost.

    Args:
        suite: what is measured with time enough.
        model: the model that reads.
        methods: number of methods that are compared.
        seconds: the time [s]; None for what suits the size of the model.
        finished: file in which the measured speed is kept.
        chosen: fields of the spec that stay as they are where no time is given.
    """
    spec = replace(suite.spec, windows=len(suite.windows))
    if seconds is None:
        scalable = [name for name in SCALABLE if name not in chosen]
        least = tokens_to_read(smallest(spec, scalable))
        return suite_within(suite, max(default_tokens(model) / methods, least), scalable)
    rows, context = min(spec.rows, max(1, len(suite.windows))), trained_length(model)
    most = tokens_within(model, seconds, spec.longest, finished, rows=rows, chunk=spec.chunk)
    return suite_within(suite, most, cost=lambda one: tokens_of_spec(one, context) + methods * tokens_computed(one))


def tokens_within(
    model: nn.Module, seconds: float, length: int, finished: Path, *, rows: int, chunk: int | None
) -> int:
    """Return how many tokens all processes read in a time; a command that goes on reads as many as it planned at first.

    Args:
        model: the model that reads.
        seconds: the time [s].
        length: the longest row that will be read, which takes the most time for each token [tokens].
        finished: file of the result cache in which the answer is kept.
        rows: the rows that are read side by side.
        chunk: the tokens of a forward pass; None for all.
    """

    def measure() -> float:
        cache = ResultCache(finished)
        name = key(what="speed", model=fingerprint(model), seconds=seconds, length=length, rows=rows, chunk=chunk)
        if name not in cache:
            cache[name] = tokens_per_second(model, length, rows=rows, chunk=chunk)
        return float(cache[name])

    return int(FILLED_SHARE * seconds * from_first(measure)) * ways(model)


@torch.no_grad()
def tokens_per_second(
    model: nn.Module,
    length: int,
    *,
    rows: int = 1,
    chunk: int | None = None,
) -> float:
    """Measure how fast a model reads rows of tokens: short ones, and ever longer ones while time allows.

    The cost of rows that are longer than there is time for is extrapolated: for each token it grows linearly with the
    length of the row, by attention.

    Args:
        model: a causal language model.
        length: length of the rows [tokens].
        rows: rows that are read side by side; tried where a single one took little time.
        chunk: tokens per forward pass.
    """
    reader = Reader(model)
    if reader.dynamic:  # whole rows, one at a time
        rows, chunk = 1, None

    def seconds(count: int, size: int) -> float:
        ids = (torch.arange(count * size) % reader.vocabulary).view(count, size)
        started = time.perf_counter()
        losses(reader, ids, [1] * count, chunk=chunk)  # waits for a GPU
        return time.perf_counter() - started

    with in_eval_mode(model):
        seconds(1, min(length, 16))  # the first call of a process is slower
        size, spent, sizes, costs = min(length, SHORTEST_ROW), 0.0, list[int](), list[float]()
        while True:
            took = seconds(1, size)
            spent += took
            sizes.append(size)
            costs.append(took / size)
            if size == length or spent + 2.5 * took > MEASURING_SECONDS:
                break
            size = min(2 * size, length)
        if size == length and rows > 1 and rows * took < MEASURING_SECONDS:
            return rows * length / seconds(rows, length)
    growing = float(np.polyfit(sizes, costs, 1, w=sizes)[0]) if len(sizes) > 1 else 0.0
    growing = max(growing, 0.0)  # noise never makes longer rows faster
    return 1 / (costs[-1] + growing * (length - sizes[-1]))
