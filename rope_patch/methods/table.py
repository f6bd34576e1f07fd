"""Any table, number by number."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rope_patch.frequencies import table_of
from rope_patch.methods.longrope import PerPair, check_count
from rope_patch.methods.method import number
from rope_patch.tables import RotaryTable


@dataclass(frozen=True)
class Table(PerPair, name="table"):
    """Any table, number by number: what a search found, for example. The table found by default.

    ``values`` are frequencies [rad/token], fast to slow, one per pair; ``attention_scaling`` defaults to the one found.
    With a ``layer_type`` the tables of other layers stay as they are, so a chain of such methods gives each layer type
    its own table.
    """

    values: tuple[float, ...] | None = number(None, least=0, unit="rad/token")
    attention_scaling: float | None = number(None, above=0)
    layer_type: str | None = None

    def check_table(self, table: RotaryTable) -> None:
        """Refuse a table with another number of pairs."""
        if self._is_for(table):
            check_count("values", self.values, table)

    def inv_freq(self, table: RotaryTable) -> Tensor:
        """Return the values, or the frequencies of the checkpoint if there are none for this table."""
        if self.values is None or not self._is_for(table):
            return table.inv_freq
        return table_of(self.values)

    def scaling(self, table: RotaryTable) -> float:
        """Return ``attention_scaling``, by default that of the checkpoint."""
        given = self.attention_scaling
        if given is None or not self._is_for(table):
            return table.attention_scaling
        return given

    def _is_for(self, table: RotaryTable) -> bool:
        return self.layer_type in (None, table.layer_type)
