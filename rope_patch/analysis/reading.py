"""How much an analysis reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from rope_patch.analysis.attention_mass import measure_heads
from rope_patch.analysis.p_sweep import BEYOND, CHUNK, CONTEXT, sweep_shape
from rope_patch.evaluation.budget import tokens_within
from rope_patch.evaluation.domains import TextRows
from rope_patch.options.analyze import AnalyzeOptions

TOKENS = 16384
"""Tokens that the statistics read at most where no number is given."""
SHORTEST_ROW = 64
"""Length of the rows at least where a time decides [tokens]."""
PASSES = 2
"""Times that the rows are read: for the statistics and for the heads."""


def split_tokens(total: int, p_values: Sequence[float], rows: int | None = None) -> tuple[int, int]:
    """Return how many tokens of a total the rows and each p of the sweep have.

    Half goes to the rows, which are read twice, and the rest to the tables of the sweep.

    Args:
        total: of all passes [tokens].
        p_values: of the sweep.
        rows: tokens of the rows, where they are known [tokens].
    """
    rows = min(TOKENS, total // 2 // PASSES) if rows is None else rows
    return rows, max(0, total - PASSES * rows) // (1 + len(p_values))


def tokens_in_time(model: nn.Module, seconds: float, window: int, context: int, finished: Path) -> int:
    """Return how many tokens of all passes fit into a time, at the speed of the slower kind of pass.

    Args:
        model: the model to be analyzed.
        seconds: the time [s].
        window: length of the rows of the statistics [tokens].
        context: of the model; the p sweep reads rows beyond it [tokens].
        finished: file in which the speed is kept, so that a run that goes on reads the same.
    """
    longest = BEYOND * min(context, CONTEXT)
    sweep = tokens_within(model, seconds, longest, finished, chunk=min(CHUNK, longest))
    heads = tokens_within(model, seconds, window, finished, read=lambda ids: measure_heads(model, ids))
    return min(sweep, heads)


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
        """Return the tokens that are read: what an analysis reports as its progress.

        Args:
            rows: tokens of all rows.
            sweep_tokens: that each p may read; without limit by default.
        """
        edges, windows = sweep_shape(self.context, sweep_tokens, self.available)
        return PASSES * rows + self.tables * windows * edges[-1]

    def rows_within(
        self, read: Callable[..., TextRows], total: int, options: AnalyzeOptions
    ) -> tuple[TextRows, int, int]:
        """Return the rows of the statistics, the tokens that each p may read, and the tokens of all passes.

        Where a time is given and one row of each text takes too long, rows are shorter, unless the user chose their
        length.

        Args:
            read: returns rows of as many tokens as it is given, at least one of each text.
            total: tokens of all passes that suit the size of the model, or that a time has room for.
            options: what the user chose of the tokens, the length of the rows and the time.

        Raises:
            ValueError: the least that can be read takes longer than the time.
        """
        within, reading = options.budget is not None, self
        share, _ = split_tokens(total, self.p_values)
        if within and not self.p_values:
            share = min(TOKENS, total // PASSES)
        rows = read(tokens=options.tokens_read or max(2, share))
        if within and options.tokens_read is None and options.window is None and rows.ids.numel() > share:
            window = min(self.window, max(SHORTEST_ROW, share // len(set(rows.groups))))
            rows, reading = read(tokens=max(2, share), window=window), replace(self, window=window)
        _, sweep = split_tokens(total, self.p_values, rows.ids.numel())
        planned = reading.tokens(rows.ids.numel(), sweep)
        if within and planned > total:
            raise ValueError(
                f"at least {planned} tokens would be read, and the time has room for {total}: give more time, fewer "
                "--p, or less --tokens in shorter rows (--window)"
            )
        return rows, sweep, planned
