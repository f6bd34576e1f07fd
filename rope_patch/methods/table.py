"""A table given number by number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rope_patch import frequencies
from rope_patch.methods.base import (
    Method,
    check_length,
    check_positive,
)
from rope_patch.tables import RotarySlot


@dataclass(frozen=True)
class Table(Method, name="table"):
    """Any table: what fits, searches and imports produce. The table found by default.

    ``values`` are frequencies [rad/token], fast to slow, one per pair; ``attention_scaling`` defaults to the one found.
    With a ``layer_type`` the tables of others are left alone: so a chain gives each its own.
    """

    values: tuple[float, ...] | None = None
    attention_scaling: float | None = None
    layer_type: str | None = None
    extends: ClassVar[bool] = True

    def for_target(self, slot: RotarySlot, target_length: int | None) -> Table:
        """Return the method: its values decide how far the table reaches.

        Raises:
            ValueError: a target, and no values.
        """
        if target_length is not None and self.values is None:
            raise ValueError(
                f"table without values leaves the table as it is: it is not made for target_length {target_length}"
            )
        return self

    def check(self) -> None:
        """No negative frequency."""
        for value in self.values or ():
            if value < 0:
                raise ValueError(f"frequencies must be >= 0 rad/token, got {value}")
        check_positive("attention_scaling", self.attention_scaling)

    def __call__(self, slot: RotarySlot) -> RotarySlot:
        """Put the table in."""
        if self.layer_type is not None and slot.layer_type != self.layer_type:
            return slot
        if self.values is None and self.attention_scaling is None:
            return slot
        table = slot.inv_freq
        if self.values is not None:
            check_length("values", self.values, slot)
            table = frequencies.table_of(self.values)
        return slot.becomes(table, attention_scaling=self.attention_scaling)
