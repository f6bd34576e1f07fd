"""Methods that set slow pairs to few values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rope_patch import frequencies
from rope_patch.methods.base import (
    Method,
    check_positive,
)
from rope_patch.tables import RotarySlot


@dataclass(frozen=True)
class Truncated(Method, name="truncated"):
    """Truncated basis: still the slow pairs.

    Two forms. ``cutoff_low``, ``cutoff_high`` and ``floor`` [rad/token] are Giraffe's: ``f >= high`` is kept,
    ``low < f < high`` becomes ``floor``, ``f <= low`` is still (Pal et al., arXiv:2308.10882). ``context`` [tokens]
    stills every pair that never completes a turn within it, ``f < 2 pi / context`` (Jonasson, arXiv:2503.01832, eq. 15,
    used as a cut; also HoPE and the critical dimension of Liu et al. 2024); it defaults to the trained context.
    """

    context: int | None = None
    cutoff_low: float | None = None
    cutoff_high: float | None = None
    floor: float = 0.0

    def check(self) -> None:
        """One form at a time, cutoffs in order."""
        cutoffs = (self.cutoff_low, self.cutoff_high)
        if (self.cutoff_low is None) != (self.cutoff_high is None):
            raise ValueError(f"cutoff_low and cutoff_high come together, got {cutoffs[0]} and {cutoffs[1]}")
        if self.context is not None and self.cutoff_low is not None:
            raise ValueError("truncated takes context or the two cutoffs, not both")
        check_positive("context", self.context)
        if self.floor < 0:
            raise ValueError(f"floor must be >= 0 rad/token, got {self.floor}")
        if self.cutoff_low is None and self.floor:
            raise ValueError("floor needs cutoff_low and cutoff_high")
        if (
            self.cutoff_low is not None
            and self.cutoff_high is not None
            and not 0 <= self.cutoff_low <= self.cutoff_high
        ):
            raise ValueError(f"cutoffs must satisfy 0 <= cutoff_low <= cutoff_high, got {cutoffs[0]} and {cutoffs[1]}")

    def __call__(self, slot: RotarySlot) -> RotarySlot:
        """Cut the table found."""
        f = slot.inv_freq
        if self.cutoff_low is not None and self.cutoff_high is not None:
            between = torch.where(f > self.cutoff_low, torch.full_like(f, self.floor), torch.zeros_like(f))
            table = torch.where(f >= self.cutoff_high, f, between)
        else:
            bound = frequencies.offset_frequency_bound(self.context or slot.context)
            table = torch.where(f < bound, torch.zeros_like(f), f)
        return slot if torch.equal(table, f) else slot.becomes(table)
