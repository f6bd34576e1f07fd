"""A rotary table given number by number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rope_patch import frequencies
from rope_patch.methods.base import Method, check_count
from rope_patch.methods.parameters import number
from rope_patch.tables import RotaryTable


@dataclass(frozen=True)
class Table(Method, name="table"):
    """Any table, number by number: what a search found, for example. The table found by default.

    ``values`` are frequencies [rad/token], fast to slow, one per pair; ``attention_scaling`` defaults to the one found.
    With a ``layer_type`` the tables of other layers stay as they are, so a chain of such methods gives each layer type
    its own table.
    """

    values: tuple[float, ...] | None = number(None, least=0, unit="rad/token")
    attention_scaling: float | None = number(None, above=0)
    layer_type: str | None = None
    extends: ClassVar[bool] = True

    def for_target(self, table: RotaryTable, target_length: int | None) -> Table:
        """Return the method unchanged: its values decide how far the table reaches.

        Raises:
            ValueError: there is a target but no values.
        """
        if target_length is not None and self.values is None:
            raise ValueError(
                f"table without values leaves the table as it is: it is not made for target_length {target_length}"
            )
        return self

    def check_table(self, table: RotaryTable) -> None:
        """Refuse a table with another number of pairs."""
        if self._is_for(table):
            check_count("values", self.values, table)

    def inv_freq(self, table: RotaryTable) -> Tensor:
        """Return the values, or the frequencies of the checkpoint if there are none for this table."""
        if self.values is None or not self._is_for(table):
            return table.inv_freq
        return frequencies.table_of(self.values)

    def scaling(self, table: RotaryTable) -> float:
        """Return ``attention_scaling``, by default that of the checkpoint."""
        given = self.attention_scaling
        if given is None or not self._is_for(table):
            return table.attention_scaling
        return given

    def _is_for(self, table: RotaryTable) -> bool:
        return self.layer_type in (None, table.layer_type)
