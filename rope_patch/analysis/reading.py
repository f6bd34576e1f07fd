"""How much an analysis reads, how long that takes, and what is lost where it reads less."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rope_patch.analysis.attention_mass import measure_heads, repeated_tokens
from rope_patch.analysis.p_sweep import BEYOND, CHUNK, CONTEXT, WINDOWS, sweep_shape
from rope_patch.evaluation.intervals import widening
from rope_patch.modeling.budget import Pace, measure_pace, pace_of_reading

TOKENS = 16384
"""Tokens that the statistics read at most where no number is given."""
SHORTEST_ROW = 64
"""Length of the rows at least where a time decides [tokens]."""
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


@dataclass(frozen=True)
class AnalysisReading:
    """What an analysis reads, whatever number of tokens its rows and its sweep have.

    Attributes:
        window: length of a row [tokens].
        p_values: of the sweep; without any there is no sweep.
        context: of the model [tokens].
        available: tokens of the text of the sweep, from :func:`~rope_patch.analysis.p_sweep.text_tokens`; enough by
            default.
    """

    window: int
    p_values: Sequence[float]
    context: int
    available: int | None = None

    @property
    def tables(self) -> int:
        """How many tables the sweep measures."""
        return 1 + len(self.p_values) if self.p_values else 0

    def tokens(self, rows: int, sweep_tokens: int | None) -> int:
        """Return the tokens that are read: what an analysis reports to its ``on_progress``.

        Args:
            rows: tokens of all rows.
            sweep_tokens: that each p may read; without limit by default.
        """
        edges, windows = sweep_shape(self.context, sweep_tokens, self.available)
        return PASSES * rows + self.tables * windows * edges[-1]

    def seconds(self, rows: int, sweep_tokens: int | None, paces: Sequence[Pace]) -> float:
        """Return how long :meth:`tokens` take [s].

        Args:
            rows: tokens of all rows.
            sweep_tokens: that each p may read.
            paces: from :func:`paces_of`.
        """
        text, heads = paces
        edges, windows = sweep_shape(self.context, sweep_tokens, self.available)
        statistics = (text * (PASSES - 1) + heads).seconds(rows, self.window)
        return statistics + self.tables * text.seconds(windows * edges[-1], edges[-1])

    def split(self, seconds: float, paces: Sequence[Pace], rows: int | None = None) -> tuple[int, int]:
        """Return how many tokens the rows and each p of the sweep have in a time; half of it goes to the rows, or all.

        Args:
            seconds: for all passes [s].
            paces: from :func:`paces_of`.
            rows: tokens of the rows, where they are known.
        """
        text, heads = paces
        if rows is None:
            share = seconds / 2 if self.p_values else seconds
            rows = min(TOKENS, int(share / (text * (PASSES - 1) + heads).seconds(1, self.window)))
        tokens = WINDOWS * BEYOND * CONTEXT
        while tokens > 1 and self.seconds(rows, tokens, paces) > seconds:
            tokens = tokens * 9 // 10
        return rows, tokens

    def cost_of(self, rows: Sequence[int], sweep_tokens: Sequence[int | None], window: int | None = None) -> str:
        """Return what is lost where an analysis reads less, as a sentence; "" where nothing is.

        Args:
            rows: tokens of all rows, before and in the time that there is.
            sweep_tokens: that each p may read, likewise.
            window: length of a row before; by default what it is.

        Example:
            >>> reading = AnalysisReading(512, [0.5], context=512)
            >>> print(reading.cost_of([16384, 4096], [16384, 2048]).replace("; ", chr(10)))
            statistics over 4096 instead of 16384 tokens may differ up to 2.0 times as much on another text
            the p sweep reads 4 instead of 8 windows (intervals up to 1.9 times as wide) and nothing beyond position 512
        """
        parts = []
        if rows[1] < rows[0]:
            wider = math.sqrt(rows[0] / rows[1])
            parts.append(
                f"statistics over {rows[1]} instead of {rows[0]} tokens may differ up to {wider:.1f} times as much on "
                "another text"
            )
        if window is not None and self.window < window:
            parts.append(f"their rows have {self.window} instead of {window} tokens, and longer distances are not seen")
        (edges, before), (shorter, after) = (
            sweep_shape(self.context, tokens, self.available) for tokens in sweep_tokens
        )
        lost = []
        if after < before:
            wide = f"intervals up to {widening(before, after):.1f} times as wide" if after > 1 else "without intervals"
            lost.append(f"{after} instead of {before} windows ({wide})")
        if shorter[-1] < edges[-1]:
            lost.append(f"nothing beyond position {shorter[-1]}")
        if lost and self.p_values:
            parts.append(f"the p sweep reads {' and '.join(lost)}")
        return "; ".join(parts)
