"""MrRoPE-Pro."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rope_patch.frequencies import (
    InvFreq,
    geometric,
    table_of,
)
from rope_patch.methods.yarn import ByTurns, ramp_ends
from rope_patch.tables import RotaryTable


def mrrope_table(
    rope_theta: float, rotary_dim: int, *, factor: float, context: int, beta_fast: float = 32, beta_slow: float = 1
) -> InvFreq:
    """Return MrRoPE-Pro's table: YaRN's ends, and between them a divisor whose logarithm grows quadratically.

    With YaRN's rounded ends ``low`` and ``high``, ``n = high - low`` and ``t = i - low``, pair ``i`` is divided by
    ``factor ** (t (t + 1) / (n (n + 1)))`` between the ends, by 1 up to ``low`` and by ``factor`` from ``high`` on.
    *Source*: arXiv:2601.22181, eq. 14 to 16, with the rounding and the bounds of the authors' code
    (github.com/mattian7/mrRoPE at d1a6f31).

    The arguments are those of :func:`~rope_patch.methods.yarn.yarn_table`.
    """
    plain = geometric(rope_theta, rotary_dim)
    low, high = ramp_ends(rope_theta, rotary_dim, context, beta_fast, beta_slow)
    n = high - low

    def divisor(i: int) -> float:
        t = i - low
        if t <= 0:
            return 1.0
        if t >= n:
            return factor
        grown: float = factor ** (t * (t + 1) / (n * (n + 1)))
        return grown

    return plain / table_of([divisor(i) for i in range(len(plain))])


@dataclass(frozen=True)
class MrRope(ByTurns, name="mrrope"):
    """MrRoPE-Pro: YaRN's ends, with divisors between them that grow slowly at first and fast at the slow end.

    cos and sin are scaled as in YaRN, ``0.1 ln(factor) + 1``; ``attention_factor`` overrides that. *Source*:
    arXiv:2601.22181, eq. 14 to 16; rounding and scaling are those of the authors' code (mattian7/mrRoPE at d1a6f31).
    """

    def inv_freq(self, table: RotaryTable) -> Tensor:
        """Return MrRoPE-Pro's table of the checkpoint's base."""
        return mrrope_table(table.rope_theta, table.rotary_dim, **self.arguments(table))
