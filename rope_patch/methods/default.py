"""The identity."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rope_patch.methods.method import Method
from rope_patch.tables import RotaryTable


@dataclass(frozen=True)
class Default(Method, name="default"):
    """The table as found, unchanged: the identity, bit for bit, on every checkpoint."""

    def inv_freq(self, table: RotaryTable) -> Tensor:
        """Return the frequencies of the checkpoint."""
        return table.inv_freq
