"""Methods that leave pairs unrotated: p-RoPE, reversed p-RoPE, partial rotary, a cut, NoPE; and the identity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rope_patch import frequencies
from rope_patch.methods.base import Method, number
from rope_patch.tables import RotaryTable


@dataclass(frozen=True)
class Default(Method, name="default"):
    """The table as found, unchanged: the identity, bit for bit, on every checkpoint."""

    def inv_freq(self, table: RotaryTable) -> Tensor:
        """Return the frequencies of the checkpoint."""
        return table.inv_freq


@dataclass(frozen=True)
class NoPE(Method, name="nope"):
    """No rotation at all: p-RoPE with p = 0.

    *Source*: Barbero et al., arXiv:2410.06205; with recalibration afterwards it is DroPE, arXiv:2512.12167. For texts
    ``factor`` times as long as those of the recalibration DroPE multiplies attention logits by
    ``1 + temperature * ln(factor)``; here cos and sin carry the square root of that, which reaches those features of a
    head that the table covers: all of them but on families with partial rotary embeddings.
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


@dataclass(frozen=True)
class PRope(Method, name="p_rope"):
    """p-RoPE: rotate the fastest fraction ``p`` of the pairs, leave the rest unrotated.

    The slowest pairs carry the semantic channels that long contexts break; without rotation they cannot break.
    *Source*: Barbero et al., arXiv:2410.06205, appendix D. ``int(p * rotary_dim // 2)`` pairs rotate: floor, so
    p = 0.7 at rotary_dim 128 keeps 44.

    Where transformers has a type for the table (``proportional``), the frequencies that are kept are computed as it
    computes them: over those pairs alone. At some shapes, rotary_dim 128 with rope_theta 1e6 and p = 0.75 among them,
    they differ from those of the whole table in the last bit.
    """

    p: float = number(0.75, least=0, most=1)

    def inv_freq(self, table: RotaryTable) -> Tensor:
        """Return the frequencies, zero from pair ``int(p * rotary_dim // 2)`` on."""
        rotated = int(self.p * table.rotary_dim // 2)
        inv_freq = table.inv_freq.clone()
        inv_freq[rotated:] = 0
        if 0 < rotated < table.pairs and self.rope_parameters(table) is not None:
            computed = frequencies.geometric(table.rope_theta, table.rotary_dim, rotated)
            # A proportional table whose factor is not 1, or one that was edited, has other frequencies, which are kept.
            if torch.allclose(computed, inv_freq[:rotated], rtol=1e-6, atol=0.0):
                inv_freq[:rotated] = computed
        return inv_freq

    def rope_parameters(self, table: RotaryTable) -> dict[str, Any] | None:
        """Return parameters of type ``proportional``; None if the table is neither plain RoPE nor of that type."""
        # In families such as Phi the partial factor is the shape of the heads, even if it is 1, so it cannot state p.
        if table.rope_type not in ("default", "proportional") or "partial_rotary_factor" in table.other_keys:
            return None
        return {"rope_type": "proportional", "rope_theta": table.rope_theta, "partial_rotary_factor": self.p}


@dataclass(frozen=True)
class PRopeReversed(Method, name="p_rope_reversed"):
    """Reversed p-RoPE: rotate the *slowest* fraction ``p`` of the pairs, leave the fastest unrotated.

    *Source*: arXiv:2410.06205, table 2 ("0.75-RoPE reversed"). The paper gives no rounding; the floor is our choice.
    """

    p: float = number(0.75, least=0, most=1)

    def inv_freq(self, table: RotaryTable) -> Tensor:
        """Return the frequencies, all but the last ``int(p * rotary_dim // 2)`` zero."""
        inv_freq = table.inv_freq.clone()
        inv_freq[: table.pairs - int(self.p * table.rotary_dim // 2)] = 0
        return inv_freq


@dataclass(frozen=True)
class Partial(Method, name="partial"):
    """Partial rotary: the first pairs rotate with a whole geometric sequence of their own, the rest do not rotate.

    With ``r = int(p * rotary_dim // 2)`` pairs, exponents run over the smaller dimension: ``rope_theta ** (-2i / 2r)``.
    *Source*: arXiv:2410.06205, table 2 ("RoPE partial"), as in GPT-NeoX. In the half-split layout of the full head the
    unrotated features are ``r … d/2`` of each half; GPT-NeoX leaves the last ``d - 2r`` features of the head unrotated.
    """

    p: float = number(0.75, least=0, most=1)
    recomputes: ClassVar[bool] = True

    def inv_freq(self, table: RotaryTable) -> Tensor:
        """Return the first pairs' frequencies recomputed over the smaller dimension, and zero for the rest."""
        rotated = int(self.p * table.rotary_dim // 2)
        inv_freq = torch.zeros_like(table.inv_freq)
        if rotated:
            inv_freq[:rotated] = frequencies.geometric(table.rope_theta, 2 * rotated)
        return inv_freq


@dataclass(frozen=True)
class Truncated(Method, name="truncated"):
    """Truncated basis: zero the slow frequencies.

    There are two forms. ``cutoff_low``, ``cutoff_high`` and ``floor`` [rad/token] are Giraffe's: ``f >= high`` is kept,
    ``low < f < high`` becomes ``floor``, ``f <= low`` becomes zero (Pal et al., arXiv:2308.10882). ``context`` [tokens]
    zeroes every pair that never completes a turn within it, ``f < 2 pi / context`` (Jonasson, arXiv:2503.01832, eq. 15,
    used as a cut; also HoPE and the critical dimension of Liu et al. 2024); it defaults to the trained context.
    """

    context: int | None = number(None, above=0)
    cutoff_low: float | None = number(None, least=0, unit="rad/token")
    cutoff_high: float | None = number(None, least=0, unit="rad/token")
    floor: float = number(0.0, least=0, unit="rad/token")

    def check(self) -> None:
        """Raise unless the parameters belong to one form, and the cutoffs are in order."""
        low, high = self.cutoff_low, self.cutoff_high
        if (low is None) != (high is None):
            raise ValueError(f"cutoff_low and cutoff_high come together, got {low} and {high}")
        if low is None or high is None:
            if self.floor:
                raise ValueError("floor needs cutoff_low and cutoff_high")
            return
        if self.context is not None:
            raise ValueError("truncated takes context or the two cutoffs, not both")
        if low > high:
            raise ValueError(f"cutoffs must satisfy cutoff_low <= cutoff_high, got {low} and {high}")

    def inv_freq(self, table: RotaryTable) -> Tensor:
        """Return the table of the checkpoint with its slow frequencies cut off."""
        inv_freq = table.inv_freq
        if self.cutoff_low is None or self.cutoff_high is None:
            bound = frequencies.offset_frequency_bound(self.context or table.context)
            return inv_freq.masked_fill(inv_freq < bound, 0)
        below = torch.where(inv_freq > self.cutoff_low, torch.full_like(inv_freq, self.floor), 0)
        return torch.where(inv_freq >= self.cutoff_high, inv_freq, below)
