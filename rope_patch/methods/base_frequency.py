"""Methods that change the base."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rope_patch import frequencies
from rope_patch.methods.base import (
    Method,
    Scaling,
    check_plain,
    check_positive,
    with_base,
)
from rope_patch.tables import RotarySlot


@dataclass(frozen=True)
class ABF(Method, name="abf"):
    """Adjusted base frequency: recompute the table from a larger base.

    Give ``rope_theta``, or ``factor`` to multiply the base found. *Source*: Xiong et al., arXiv:2309.16039
    (10k to 500k).
    """

    rope_theta: float | None = None
    factor: float | None = None
    replace_scaling: bool = False
    extends: ClassVar[bool] = True

    def check(self) -> None:
        """Exactly one of the two, positive; 500000 when neither is given."""
        if self.rope_theta is not None and self.factor is not None:
            raise ValueError(f"abf takes rope_theta or factor, not both: got {self.rope_theta} and {self.factor}")
        if self.rope_theta is None and self.factor is None:
            object.__setattr__(self, "rope_theta", 500000.0)
        check_positive("rope_theta", self.rope_theta)
        check_positive("factor", self.factor)

    def __call__(self, slot: RotarySlot) -> RotarySlot:
        """Return the geometric table of the new base."""
        check_plain(slot, self, self.replace_scaling)
        base = self.rope_theta if self.rope_theta is not None else slot.rope_theta * (self.factor or 1.0)
        return with_base(slot, base)


@dataclass(frozen=True)
class NTK(Scaling, name="ntk"):
    """Static NTK-aware scaling: base ``rope_theta * factor ** (d / (d - 2))``.

    *Source*: "NTK-aware scaled RoPE" (bloc97, 2023), described in YaRN, arXiv:2309.00071, sec. 3.1.
    """

    replace_scaling: bool = False

    def __call__(self, slot: RotarySlot) -> RotarySlot:
        """Return the geometric table of the new base."""
        check_plain(slot, self, self.replace_scaling)
        return with_base(slot, frequencies.ntk_theta(slot.rope_theta, self.stretch, slot.rotary_dim))
