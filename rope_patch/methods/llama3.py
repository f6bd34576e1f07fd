"""Llama 3.1's smoothed interpolation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rope_patch.frequencies import (
    InvFreq,
    geometric,
)
from rope_patch.methods.method import number
from rope_patch.methods.scaling import Scaling
from rope_patch.tables import RotaryTable


def llama3_table(
    inv_freq: InvFreq, *, factor: float, low_freq_factor: float, high_freq_factor: float, context: int
) -> InvFreq:
    """Return Llama 3.1's smoothing of a table.

    Wavelengths above ``context / low_freq_factor`` are stretched by ``factor``, those below
    ``context / high_freq_factor`` kept, those between interpolated. *Source*: transformers' ``llama3`` rope type.
    """
    slow_from = context / low_freq_factor
    fast_to = context / high_freq_factor
    length = 2 * math.pi / inv_freq
    table = torch.where(length > slow_from, inv_freq / factor, inv_freq)
    smooth = (context / length - low_freq_factor) / (high_freq_factor - low_freq_factor)
    # Written operation by operation as in transformers, so that the tables are equal to the last bit.
    between = ~(length < fast_to) * ~(length > slow_from)
    return torch.where(between, (1 - smooth) * table / factor + smooth * table, table)


@dataclass(frozen=True)
class Llama3(Scaling, name="llama3"):
    """Llama 3.1's smoothed interpolation.

    *Source*: transformers' ``llama3`` type. ``original_max_position_embeddings`` defaults to the trained context.

    Args:
        low_freq_factor: pairs that make at most so many full turns are divided by the whole factor.
        high_freq_factor: pairs that make at least so many full turns keep their frequency.
        original_max_position_embeddings: the context before any scaling; left out, the one that the checkpoint says.
    """

    low_freq_factor: float = number(1.0, above=0)
    high_freq_factor: float = number(4.0, above=0)
    original_max_position_embeddings: int | None = number(None, above=0)
    recomputes = True
    own_types = ("llama3",)
    ends = ("high_freq_factor", "low_freq_factor")

    def inv_freq(self, table: RotaryTable) -> Tensor:
        """Return the plain table of the checkpoint's base with Llama 3.1's smoothing."""
        plain = geometric(table.rope_theta, table.rotary_dim)
        return llama3_table(plain, context=self.context_of(table), **self._smoothing())

    def rope_parameters(self, table: RotaryTable) -> dict[str, Any]:
        """Return parameters of type ``llama3``."""
        context = self.context_of(table)
        given = {"rope_type": "llama3", "rope_theta": table.rope_theta, "original_max_position_embeddings": context}
        return given | self._smoothing()

    def _smoothing(self) -> dict[str, float]:
        return {
            "factor": self.stretch,
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
        }
