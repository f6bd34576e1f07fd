"""No rotation at all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rope_patch.methods.method import Method, number
from rope_patch.methods.p_rope import PRope
from rope_patch.tables import RotaryTable


@dataclass(frozen=True)
class NoPE(Method, name="nope"):
    """No rotation at all: p-RoPE with p = 0.

    *Source*: Barbero et al., arXiv:2410.06205; with recalibration afterwards it is DroPE, arXiv:2512.12167. For texts
    ``factor`` times as long as those of the recalibration DroPE multiplies attention logits by
    ``1 + temperature * ln(factor)``; here cos and sin carry the square root of that, which reaches those features of a
    head that the table covers: all of them but on families with partial rotary embeddings.

    Args:
        factor: for ``temperature``: the length of the texts divided by that of the training.
        temperature: attention logits are multiplied by ``1 + temperature * ln(factor)``.
    """

    factor: float | None = number(None, least=1)
    temperature: float = number(0.0, least=0)

    def check(self) -> None:
        """Raise unless both parameters are given, or neither."""
        if (self.factor is None) != (self.temperature == 0):
            raise ValueError(
                f"factor and temperature come together: logits are multiplied by 1 + temperature * ln(factor), got "
                f"factor {self.factor} and temperature {self.temperature:g}"
            )

    def scaling(self, table: RotaryTable) -> float:
        """Return the scaling of the checkpoint times the square root of the factor on the logits."""
        grown = 1.0
        if self.factor is not None:
            # The root, since cos and sin scale queries and keys, and a logit is a product of both.
            grown = math.sqrt(1 + self.temperature * math.log(self.factor))
        return table.attention_scaling * grown

    def inv_freq(self, table: RotaryTable) -> Tensor:
        """Return zero for every pair."""
        return torch.zeros_like(table.inv_freq)

    def rope_parameters(self, table: RotaryTable) -> dict[str, Any] | None:
        """Return the encoding of p-RoPE with p = 0; None if there is a temperature, for which it has no scaling."""
        return None if self.temperature else PRope(p=0.0).rope_parameters(table)
