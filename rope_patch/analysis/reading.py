"""How much an analysis reads, how long that takes, and what is lost where it reads less."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from rope_patch.analysis.attention_mass import measure_heads, repeated_tokens
from rope_patch.analysis.p_sweep import BEYOND, CHUNK, CONTEXT, longest_sweep, sweep_shape, sweep_text
from rope_patch.evaluation.documents import Source
from rope_patch.evaluation.domains import TextRows
from rope_patch.evaluation.intervals import widening
from rope_patch.modeling.budget import Pace, measure_pace, pace_of_reading

TOKENS = 16384
"""Tokens that the statistics read at most where no number is given."""
PASSES = 3
"""Times that the rows are read: for the statistics, the heads and the sinks."""


def split_tokens(total: int, p_values: Sequence[float], rows: int | None = None) -> tuple[int, int]:
    """Return how many tokens of a total the rows and each p of the sweep have.

    Half goes to the rows, which are read three times, and the rest to the tables of the sweep.

    Args:
        total: of all passes [tokens].
        p_values: of the sweep.
        rows: tokens of the rows, where they are known [tokens].
    """
    rows = min(TOKENS, total // 2 // PASSES) if rows is None else rows
    return rows, max(0, total - PASSES * rows) // (1 + len(p_values))


def paces_of(model: nn.Module, window: int, context: int) -> tuple[Pace, Pace]:
    """Measure how long a model takes to read a text for the sweep, and for the statistics of heads.

    Args:
        model: to be analyzed.
        window: length of the rows [tokens].
        context: of the model [tokens].
    """
    longest = BEYOND * min(context, CONTEXT)
    reading = pace_of_reading(model, longest, chunk=min(CHUNK, longest))
    config: Any = model.config
    vocabulary = int(config.get_text_config().vocab_size)

    def read(ids: Tensor) -> int:
        known = ids % vocabulary
        measure_heads(model, known)
        return known.numel() + len(repeated_tokens(known))

    return reading, measure_pace(read, window)


def seconds_to_read(
    rows: int, window: int, p_values: Sequence[float], context: int, sweep_tokens: int | None, paces: tuple[Pace, Pace]
) -> float:
    """Return how long an analysis takes [s].

    Args:
        rows: tokens of all rows [tokens].
        window: length of a row [tokens].
        p_values: of the sweep.
        context: of the model [tokens].
        sweep_tokens: that each p may read [tokens].
        paces: from :func:`paces_of`.
    """
    reading, heads = paces
    sweep = longest_sweep(context, sweep_tokens)
    sweeps = 1 + len(p_values) if p_values else 0
    statistics = (reading * (PASSES - 1) + heads).seconds(rows, window)
    return statistics + sweeps * reading.seconds(sweep, sweep_shape(context, sweep)[0][-1])


def split_seconds(
    seconds: float,
    window: int,
    p_values: Sequence[float],
    context: int,
    paces: tuple[Pace, Pace],
    rows: int | None = None,
) -> tuple[int, int]:
    """Return how many tokens the rows and each p of the sweep have in a time; half of it goes to the rows.

    Args:
        seconds: for all passes [s].
        window: length of a row [tokens].
        p_values: of the sweep.
        context: of the model [tokens].
        paces: from :func:`paces_of`.
        rows: tokens of the rows, where they are known [tokens].
    """
    if rows is None:
        each = seconds_to_read(1, window, (), context, None, paces)
        rows = min(TOKENS, int(seconds / 2 / each))
    tokens = longest_sweep(context)
    while tokens > 1 and seconds_to_read(rows, window, p_values, context, tokens, paces) > seconds:
        tokens = tokens * 9 // 10
    return rows, tokens


def sweep_of(
    tokenizer: Any, text: Mapping[str, Source] | None, context: int, tokens: int
) -> tuple[tuple[int, ...], int]:
    """Return the edges of the positions that the sweep measures on a text, and how many windows it reads."""
    windows, edges, _ = sweep_text(tokenizer, text, context, tokens)
    return edges, len(windows)


def cost_of(rows: Sequence[int], sweeps: Sequence[tuple[tuple[int, ...], int]]) -> str:
    r"""Return what is lost where an analysis reads less, as a sentence; "" where nothing is.

    Args:
        rows: tokens of the statistics before, and in the time that there is [tokens].
        sweeps: edges of positions and number of windows of the p sweep, likewise; none without a sweep.

    Example:
        >>> print(cost_of([16384, 4096], [((0, 512, 2048), 8), ((0, 512), 4)]).replace("; ", "\n"))
        statistics over 4096 instead of 16384 tokens vary up to 2.0 times as much from text to text
        the p sweep reads 4 instead of 8 windows (intervals up to 1.9 times as wide) and nothing beyond position 512
    """
    parts = []
    if rows[1] < rows[0]:
        wider = math.sqrt(rows[0] / rows[1])
        parts.append(
            f"statistics over {rows[1]} instead of {rows[0]} tokens vary up to {wider:.1f} times as much from text to "
            "text"
        )
    lost = []
    if sweeps:
        (edges, before), (shorter, after) = sweeps
        if after < before:
            wide = f"intervals up to {widening(before, after):.1f} times as wide" if after > 1 else "without intervals"
            lost.append(f"{after} instead of {before} windows ({wide})")
        if shorter[-1] < edges[-1]:
            lost.append(f"nothing beyond position {shorter[-1]}")
    return "; ".join([*parts, *([f"the p sweep reads {' and '.join(lost)}"] if lost else [])])


def tokens_to_read(rows: TextRows, p_values: Sequence[float], context: int, sweep_tokens: int | None = None) -> int:
    """Return the most tokens that an analysis of rows reports to its ``on_progress``."""
    sweeps = 1 + len(p_values) if p_values else 0
    return PASSES * rows.ids.numel() + sweeps * longest_sweep(context, sweep_tokens)
