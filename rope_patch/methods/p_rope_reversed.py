"""Reversed p-RoPE: the fast pairs do not rotate."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rope_patch.methods.method import Method, number
from rope_patch.tables import RotaryTable


@dataclass(frozen=True)
class PRopeReversed(Method, name="p_rope_reversed"):
    """Reversed p-RoPE: rotate the *slowest* fraction ``p`` of the pairs, leave the fastest unrotated.

    *Source*: arXiv:2410.06205, table 2 ("0.75-RoPE reversed"). The paper gives no rounding; the floor is our choice.

    Args:
        p: the share of the pairs that rotate, rounded down to whole pairs.
    """

    p: float = number(0.75, least=0, most=1)

    def inv_freq(self, table: RotaryTable) -> Tensor:
        """Return the frequencies, all but the last ``int(p * rotary_dim // 2)`` zero."""
        inv_freq = table.inv_freq.clone()
        inv_freq[: table.pairs - int(self.p * table.rotary_dim // 2)] = 0
        return inv_freq
