"""Adjusted base frequency."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rope_patch.frequencies import geometric
from rope_patch.methods.method import Method, number
from rope_patch.methods.scaling import restated
from rope_patch.tables import RotaryTable


class OtherBase(Method):
    """Base class of the methods that compute plain RoPE of another base."""

    recomputes = True

    def base(self, table: RotaryTable) -> float:
        """Return the new base."""
        raise NotImplementedError

    def inv_freq(self, table: RotaryTable) -> Tensor:
        """Return the geometric table of the new base."""
        return geometric(self.base(table), table.rotary_dim)

    def rope_parameters(self, table: RotaryTable) -> dict[str, Any]:
        """Return the parameters of plain RoPE with the new base."""
        return {"rope_type": "default", "rope_theta": self.base(table)}


@dataclass(frozen=True)
class ABF(OtherBase, name="abf"):
    """Adjusted base frequency: recompute the table from a larger base.

    Give ``rope_theta``, or ``factor`` to multiply the base found. *Source*: Xiong et al., arXiv:2309.16039
    (10k to 500k).

    Args:
        rope_theta: the new base; 500000 where ``factor`` is left out, too.
        factor: in place of ``rope_theta``: multiplies the checkpoint's base.
    """

    rope_theta: float | None = number(None, above=0)
    factor: float | None = number(None, above=0)
    extends = True

    def check(self) -> None:
        """Raise unless at most one of the two is given; without either, the base is 500000."""
        if self.rope_theta is not None and self.factor is not None:
            raise ValueError(f"abf takes rope_theta or factor, not both: got {self.rope_theta} and {self.factor}")
        if self.rope_theta is None and self.factor is None:
            object.__setattr__(self, "rope_theta", 500000.0)

    def base(self, table: RotaryTable) -> float:
        """Return the new base."""
        if self.rope_theta is not None:
            return self.rope_theta
        return table.rope_theta * (self.factor or 1.0)

    def on_scaled(self, table: RotaryTable) -> RotaryTable | None:
        """Return the table of the checkpoint's own type under the new base."""
        return restated(table, rope_theta=self.base(table))
