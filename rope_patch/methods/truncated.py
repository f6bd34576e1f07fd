"""A truncated basis: slow frequencies are cut off."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rope_patch.frequencies import offset_frequency_bound
from rope_patch.methods.method import Method, number
from rope_patch.tables import RotaryTable


@dataclass(frozen=True)
class Truncated(Method, name="truncated"):
    """Truncated basis: zero the slow frequencies.

    There are two forms. ``cutoff_low``, ``cutoff_high`` and ``floor`` [rad/token] are Giraffe's: ``f >= high`` is kept,
    ``low < f < high`` becomes ``floor``, ``f <= low`` becomes zero (Pal et al., arXiv:2308.10882). ``context`` [tokens]
    zeroes every pair that never completes a turn within it, ``f < 2 pi / context`` (Jonasson, arXiv:2503.01832, eq. 15,
    used as a cut; also HoPE and the critical dimension of Liu et al. 2024); it defaults to the trained context.

    Args:
        context: pairs without a full turn within so many tokens stop; left out, the trained context.
        cutoff_low: frequencies up to this one become 0; those between the two cutoffs become ``floor`` [rad/token].
        cutoff_high: frequencies from this one on stay [rad/token].
        floor: the frequency of the pairs between the two cutoffs [rad/token].
    """

    context: int | None = number(None, above=0)
    cutoff_low: float | None = number(None, least=0, unit="rad/token")
    cutoff_high: float | None = number(None, least=0, unit="rad/token")
    floor: float = number(0.0, least=0, unit="rad/token")

    def check(self) -> None:
        """Raise unless the parameters belong to one form, and the cutoffs are in order."""
        low = self.cutoff_low
        high = self.cutoff_high
        if (low is None) != (high is None):
            raise ValueError(f"cutoff_low and cutoff_high come together, got {low} and {high}")
        if low is None or high is None:
            if self.floor:
                raise ValueError("floor needs cutoff_low and cutoff_high")
            return
        if self.context is not None:
            raise ValueError("truncated takes context or the two cutoffs, not both")
        if low > high:
            raise ValueError(f"cutoffs must satisfy cutoff_low <= cutoff_high, got {low} and {high}")

    def inv_freq(self, table: RotaryTable) -> Tensor:
        """Return the table of the checkpoint with its slow frequencies cut off."""
        inv_freq = table.inv_freq
        if self.cutoff_low is None or self.cutoff_high is None:
            bound = offset_frequency_bound(self.context or table.context)
            return inv_freq.masked_fill(inv_freq < bound, 0)
        below = torch.where(inv_freq > self.cutoff_low, torch.full_like(inv_freq, self.floor), 0)
        return torch.where(inv_freq >= self.cutoff_high, inv_freq, below)
