"""Static NTK-aware scaling."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rope_patch.methods.abf import OtherBase
from rope_patch.methods.scaling import Scaling
from rope_patch.tables import RotaryTable


def ntk_theta(rope_theta: float, factor: float, rotary_dim: int) -> float:
    """Return the base of static NTK-aware scaling, ``rope_theta * factor ** (d / (d - 2))``.

    The slowest pair is then slowed by exactly ``factor`` and the fastest not at all. This is the base that
    transformers' ``dynamic`` type reaches at a fixed length.

    Raises:
        ValueError: ``rotary_dim`` is below 4, for which the exponent is undefined.

    >>> round(ntk_theta(10000.0, 4.0, 128))
    40890
    """
    if rotary_dim < 4:
        raise ValueError(f"NTK scaling needs rotary_dim >= 4, got {rotary_dim}")
    return rope_theta * math.pow(factor, rotary_dim / (rotary_dim - 2))


@dataclass(frozen=True)
class NTK(Scaling, OtherBase, name="ntk"):
    """Static NTK-aware scaling: base ``rope_theta * factor ** (d / (d - 2))``.

    *Source*: "NTK-aware scaled RoPE" (bloc97, 2023), described in YaRN, arXiv:2309.00071, sec. 3.1.
    """

    def base(self, table: RotaryTable) -> float:
        """Return the new base."""
        return ntk_theta(table.rope_theta, self.stretch, table.rotary_dim)
