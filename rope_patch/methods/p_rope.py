"""Methods that stop pairs: p-RoPE, reversed, partial and none at all; and the one that does nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rope_patch import frequencies
from rope_patch.methods.base import (
    Method,
    check_plain,
    check_range,
)
from rope_patch.tables import RotarySlot


@dataclass(frozen=True)
class Default(Method, name="default"):
    """The table as found, unchanged: the identity, bit for bit, on every checkpoint."""

    def __call__(self, slot: RotarySlot) -> RotarySlot:
        """Return the slot itself."""
        return slot


@dataclass(frozen=True)
class NoPE(Method, name="nope"):
    """No rotation at all: p-RoPE with p = 0.

    *Source*: B24, arXiv:2410.06205; with recalibration afterwards it is DroPE, arXiv:2512.12167.
    """

    def __call__(self, slot: RotarySlot) -> RotarySlot:
        """Still every pair."""
        return PRope(p=0.0)(slot)


@dataclass(frozen=True)
class PRope(Method, name="p_rope"):
    """p-RoPE: keep the fastest fraction ``p`` of the pairs, still the rest.

    The slowest pairs carry the semantic channels that long contexts break; without rotation they cannot break.
    *Source*: Barbero et al., arXiv:2410.06205, appendix D. ``int(p * rotary_dim // 2)`` pairs rotate: floor, so
    p = 0.7 at rotary_dim 128 keeps 44.
    """

    p: float = 0.75

    def check(self) -> None:
        """``p`` is a fraction."""
        check_range("p", self.p, 0, 1)

    def __call__(self, slot: RotarySlot) -> RotarySlot:
        """Still pairs from ``int(p * rotary_dim // 2)`` on."""
        table = slot.inv_freq.clone()
        table[int(self.p * slot.rotary_dim // 2) :] = 0
        if torch.equal(table, slot.inv_freq):
            return slot
        native = {"rope_type": "proportional", "rope_theta": slot.rope_theta, "partial_rotary_factor": self.p}
        shaped = "partial_rotary_factor" in slot.other_keys  # by it attention splits its heads, Phi's even at 1
        spelled = slot.rope_type in ("default", "proportional") and not shaped
        return slot.becomes(table, spelling=native if spelled else None)


@dataclass(frozen=True)
class PRopeReversed(Method, name="p_rope_reversed"):
    """Reversed p-RoPE: keep the *slowest* fraction ``p`` of the pairs, still the fastest.

    *Source*: arXiv:2410.06205, table 2 ("0.75-RoPE reversed"). The paper gives no rounding; the floor is our choice.
    """

    p: float = 0.75

    def check(self) -> None:
        """``p`` is a fraction."""
        check_range("p", self.p, 0, 1)

    def __call__(self, slot: RotarySlot) -> RotarySlot:
        """Still all but the last ``int(p * rotary_dim // 2)`` pairs."""
        table = slot.inv_freq.clone()
        table[: slot.pairs - int(self.p * slot.rotary_dim // 2)] = 0
        return slot if torch.equal(table, slot.inv_freq) else slot.becomes(table)


@dataclass(frozen=True)
class Partial(Method, name="partial"):
    """Partial rotary: the first pairs rotate with a whole geometric sequence of their own, the rest are still.

    With ``r = int(p * rotary_dim // 2)`` pairs, exponents run over the smaller dimension: ``rope_theta ** (-2i / 2r)``.
    *Source*: arXiv:2410.06205, table 2 ("RoPE partial"), as in GPT-NeoX. In the half-split layout of the full head the
    still features are ``r … d/2`` of each half; GPT-NeoX leaves the last ``d - 2r`` features of the head unrotated.
    """

    p: float = 0.75
    replace_scaling: bool = False

    def check(self) -> None:
        """``p`` is a fraction."""
        check_range("p", self.p, 0, 1)

    def __call__(self, slot: RotarySlot) -> RotarySlot:
        """Recompute the first pairs over the smaller dimension."""
        check_plain(slot, self, self.replace_scaling)
        kept = int(self.p * slot.rotary_dim // 2)
        table = torch.zeros_like(slot.inv_freq)
        if kept:
            table[:kept] = frequencies.geometric(slot.rope_theta, 2 * kept)
        plain = {"rope_type": "default", "rope_theta": slot.rope_theta}
        return slot.becomes(table, spelling=plain if kept == slot.pairs else None, attention_scaling=1.0)
