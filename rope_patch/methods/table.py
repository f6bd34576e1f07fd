"""Any table, number by number."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rope_patch.frequencies import table_of
from rope_patch.methods.longrope import PerPair
from rope_patch.methods.method import number
from rope_patch.tables import RotaryTable


@dataclass(frozen=True)
class Table(PerPair, name="table"):
    """Any table, number by number, such as the result of a search. By default the checkpoint's own table.

    ``values`` are frequencies [rad/token], fast to slow, one per pair; ``attention_scaling`` defaults to the one found.
    With a ``layer_type`` the tables of other layers stay as they are, so a chain of such methods gives each layer type
    its own table.

    Args:
        values: a frequency for each pair, fast to slow, joined by ``/`` [rad/token]; left out, the checkpoint's own.
        attention_scaling: the factor on cos and sin; left out, the checkpoint's own.
        layer_type: the layers whose table is replaced, for example ``full_attention``; left out, all of them.
    """

    values: tuple[float, ...] | None = number(None, least=0, unit="rad/token")
    attention_scaling: float | None = number(None, above=0)
    layer_type: str | None = None

    def __call__(self, table: RotaryTable) -> RotaryTable:
        """Return the new table; that of another layer type than the method's is returned as it is."""
        if self.layer_type not in (None, table.layer_type):
            return table
        return super().__call__(table)

    def inv_freq(self, table: RotaryTable) -> Tensor:
        """Return the values, or the frequencies of the checkpoint if there are none."""
        return table.inv_freq if self.values is None else table_of(self.values)

    def scaling(self, table: RotaryTable) -> float:
        """Return ``attention_scaling``, by default that of the checkpoint."""
        return self.attention_scaling or table.attention_scaling
