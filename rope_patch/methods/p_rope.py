"""p-RoPE: the slow pairs do not rotate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rope_patch.frequencies import geometric
from rope_patch.methods.method import Method, number
from rope_patch.tables import RotaryTable


@dataclass(frozen=True)
class PRope(Method, name="p_rope"):
    """p-RoPE: rotate the fastest fraction ``p`` of the pairs, leave the rest unrotated.

    The slowest pairs carry the semantic channels that long contexts break; without rotation they cannot break.
    *Source*: Barbero et al., arXiv:2410.06205, appendix D. ``int(p * rotary_dim // 2)`` pairs rotate: floor, so
    p = 0.7 at rotary_dim 128 keeps 44.

    Where transformers has a type for the table (``proportional``), the frequencies that are kept are computed as it
    computes them: over those pairs alone. At some shapes, rotary_dim 128 with rope_theta 1e6 and p = 0.75 among them,
    they differ from those of the whole table in the last bit.

    Args:
        p: the share of the pairs that rotate, rounded down to whole pairs.
    """

    p: float = number(0.75, least=0, most=1)

    def inv_freq(self, table: RotaryTable) -> Tensor:
        """Return the frequencies, zero from pair ``int(p * rotary_dim // 2)`` on."""
        rotated = int(self.p * table.rotary_dim // 2)
        inv_freq = table.inv_freq.clone()
        inv_freq[rotated:] = 0
        if 0 < rotated < table.pairs and self.rope_parameters(table) is not None:
            computed = geometric(table.rope_theta, table.rotary_dim, rotated)
            # A proportional table whose factor is not 1, or one that was edited, has other frequencies, which are kept.
            if torch.allclose(computed, inv_freq[:rotated], rtol=1e-6, atol=0.0):
                inv_freq[:rotated] = computed
        return inv_freq

    def rope_parameters(self, table: RotaryTable) -> dict[str, Any] | None:
        """Return parameters of type ``proportional``; None if the table is neither plain RoPE nor of that type."""
        # In families such as Phi the partial factor is the shape of the heads, even if it is 1, so it cannot state p.
        if table.rope_type not in ("default", "proportional") or "partial_rotary_factor" in table.other_keys:
            return None
        return {"rope_type": "proportional", "rope_theta": table.rope_theta, "partial_rotary_factor": self.p}
