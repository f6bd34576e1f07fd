"""LongRoPE: a divisor for every pair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rope_patch import frequencies
from rope_patch.methods.base import (
    Method,
    check_length,
    check_positive,
)
from rope_patch.tables import RotarySlot


@dataclass(frozen=True)
class LongRope(Method, name="longrope"):
    """LongRoPE: each frequency divided by a factor of its own; all ones by default.

    ``attention_factor`` defaults to ``sqrt(1 + ln(factor) / ln(L))`` with ``L`` the trained context, which is 1 for the
    default ``factor`` 1. One list only: a short and a long table that differ would switch during generation and break
    cached keys. *Source*: Ding et al., arXiv:2402.13753.
    """

    factors: tuple[float, ...] | None = None
    factor: float = 1.0
    attention_factor: float | None = None
    extends: ClassVar[bool] = True

    def for_target(self, slot: RotarySlot, target_length: int | None) -> LongRope:
        """Return the method: its list decides how far the table reaches.

        Raises:
            ValueError: a target, and no list.
        """
        if target_length is not None and self.factors is None:
            raise ValueError(
                f"longrope without factors leaves the table as it is: it is not made for target_length {target_length}"
            )
        return self

    def check(self) -> None:
        """Every factor is positive."""
        check_positive("factor", self.factor)
        check_positive("attention_factor", self.attention_factor)
        for value in self.factors or ():
            check_positive("factors", value)

    def __call__(self, slot: RotarySlot) -> RotarySlot:
        """Divide the table found by the factors."""
        factors = self.factors if self.factors is not None else (1.0,) * slot.pairs
        check_length("factors", factors, slot)
        scaling = self.attention_factor
        if scaling is None:
            grown = 1 + math.log(self.factor) / math.log(slot.context) if self.factor > 1 else 1.0
            scaling = math.sqrt(grown) * slot.attention_scaling
        if slot.is_geometric:
            native = longrope_spelling(factors, slot, attention_scaling=scaling)
            return slot.becomes(
                frequencies.longrope(slot.rope_theta, factors), spelling=native, attention_scaling=scaling
            )
        return slot.becomes(slot.inv_freq / frequencies.table_of(factors), attention_scaling=scaling)


def longrope_spelling(factors: Sequence[float], slot: RotarySlot, *, attention_scaling: float) -> dict[str, Any]:
    """Return the longrope form that every stock loader rebuilds one fixed table from.

    Both lists are equal, so nothing switches; ``original_max_position_embeddings`` equals ``max_position_embeddings``,
    so no engine derives a scaling of its own. vLLM takes the scaling from the ``mscale`` keys; they are written only
    where it is not 1, since transformers logs them as unrecognized.
    """
    form = {
        "rope_type": "longrope",
        "rope_theta": slot.rope_theta,
        "short_factor": list(factors),
        "long_factor": list(factors),
        "factor": 1.0,
        "attention_factor": attention_scaling,
        "original_max_position_embeddings": slot.max_position_embeddings,
    }
    if attention_scaling != 1.0:
        form |= {"short_mscale": attention_scaling, "long_mscale": attention_scaling}
    return form
