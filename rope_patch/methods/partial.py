"""Partial rotary: a whole sequence on the first pairs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rope_patch.frequencies import geometric
from rope_patch.methods.method import Method, number
from rope_patch.tables import RotaryTable


@dataclass(frozen=True)
class Partial(Method, name="partial"):
    """Partial rotary: the first pairs rotate with a whole geometric sequence of their own, the rest do not rotate.

    With ``r = int(p * rotary_dim // 2)`` pairs, exponents run over the smaller dimension: ``rope_theta ** (-2i / 2r)``.
    *Source*: arXiv:2410.06205, table 2 ("RoPE partial"), as in GPT-NeoX. In the half-split layout of the full head the
    unrotated features are ``r … d/2`` of each half; GPT-NeoX leaves the last ``d - 2r`` features of the head unrotated.

    Args:
        p: the share of the pairs that rotate, rounded down to whole pairs.
    """

    p: float = number(0.75, least=0, most=1)
    recomputes = True

    def inv_freq(self, table: RotaryTable) -> Tensor:
        """Return the first pairs' frequencies recomputed over the smaller dimension, and zero for the rest."""
        rotated = int(self.p * table.rotary_dim // 2)
        inv_freq = torch.zeros_like(table.inv_freq)
        if rotated:
            inv_freq[:rotated] = geometric(table.rope_theta, 2 * rotated)
        return inv_freq
