"""Position interpolation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rope_patch.methods.scaling import Scaling
from rope_patch.tables import RotaryTable


@dataclass(frozen=True)
class PI(Scaling, name="pi"):
    """Position interpolation: every frequency divided by ``factor``.

    A table that is scaled already is divided as it is. *Source*: Chen et al., arXiv:2306.15595; the factor is 1/alpha
    in arXiv:2309.16039.
    """

    own_types = ("linear", "proportional")

    def inv_freq(self, table: RotaryTable) -> Tensor:
        """Return the frequencies of the checkpoint divided by the factor."""
        return table.inv_freq / self.stretch

    def rope_parameters(self, table: RotaryTable) -> dict[str, Any] | None:
        """Return parameters of type ``linear``; None if the table is not plain RoPE, which alone that type divides."""
        if not table.is_geometric:
            return None
        return {"rope_type": "linear", "rope_theta": table.rope_theta, "factor": self.stretch}
