"""The methods: frozen dataclasses that map a table found in a checkpoint to a new one.

Adding a method is one class: its name, its fields with defaults, its checks, and ``__call__``. The registry, the
grammar, the command line and the tests pick it up from there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from rope_patch import frequencies
from rope_patch.registry import (
    METHODS,
    Chain,
    Method,
    MethodLike,
    Scaling,
    as_method,
    create,
    did_you_mean,
    field_help,
    from_dict,
    parse,
)
from rope_patch.rotary import RotarySlot

__all__ = [
    "METHODS",
    "Chain",
    "Method",
    "MethodLike",
    "Scaling",
    "as_method",
    "create",
    "did_you_mean",
    "field_help",
    "from_dict",
    "parse",
]


def _needs_plain(slot: RotarySlot, method: Method, replace_scaling: bool) -> None:
    """Raise unless the slot is plain RoPE or the user asked to drop its scaling."""
    if not replace_scaling and not slot.is_geometric:
        raise ValueError(
            f"{method.name} recomputes the table from rope_theta, but {slot.path} is already scaled or not geometric "
            f"(rope_type {slot.rope_type!r}). Pass replace_scaling=True to drop that scaling first."
        )


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
        _in_range("p", self.p, 0, 1)

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
        _in_range("p", self.p, 0, 1)

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
        _in_range("p", self.p, 0, 1)

    def __call__(self, slot: RotarySlot) -> RotarySlot:
        """Recompute the first pairs over the smaller dimension."""
        _needs_plain(slot, self, self.replace_scaling)
        kept = int(self.p * slot.rotary_dim // 2)
        table = torch.zeros_like(slot.inv_freq)
        if kept:
            table[:kept] = frequencies.geometric(slot.rope_theta, 2 * kept)
        plain = {"rope_type": "default", "rope_theta": slot.rope_theta}
        return slot.becomes(table, spelling=plain if kept == slot.pairs else None, attention_scaling=1.0)


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
        _positive("rope_theta", self.rope_theta)
        _positive("factor", self.factor)

    def __call__(self, slot: RotarySlot) -> RotarySlot:
        """Return the geometric table of the new base."""
        _needs_plain(slot, self, self.replace_scaling)
        base = self.rope_theta if self.rope_theta is not None else slot.rope_theta * (self.factor or 1.0)
        return _geometric(slot, base)


def _geometric(slot: RotarySlot, rope_theta: float) -> RotarySlot:
    return slot.becomes(
        frequencies.geometric(rope_theta, slot.rotary_dim),
        spelling={"rope_type": "default", "rope_theta": rope_theta},
        attention_scaling=1.0,
    )


@dataclass(frozen=True)
class PI(Scaling, name="pi"):
    """Position interpolation: every frequency divided by ``factor``.

    The factor multiplies the context that the table found states, scaled or not. *Source*: Chen et al.,
    arXiv:2306.15595; it is alpha = 1/factor of arXiv:2309.16039.
    """

    replace_scaling: bool = False

    def context_of(self, slot: RotarySlot) -> int:
        """Return the context of the table that is divided: the stated one, or the first if its scaling is dropped."""
        return slot.context if self.replace_scaling else slot.max_position_embeddings

    def __call__(self, slot: RotarySlot) -> RotarySlot:
        """Divide the table found; refused where it already was interpolated."""
        if self.replace_scaling:
            slot = _geometric(slot, slot.rope_theta)
        if slot.rope_type == "linear":
            scaled = (slot.rope_parameters or {}).get("factor")
            raise ValueError(
                f"{slot.path} is already interpolated (rope_type 'linear', factor {scaled}): a second pi would "
                "multiply the factors. Pass replace_scaling=True with the whole factor."
            )
        native = {"rope_type": "linear", "rope_theta": slot.rope_theta, "factor": self.stretch}
        return slot.becomes(slot.inv_freq / self.stretch, spelling=native if slot.is_geometric else None)


@dataclass(frozen=True)
class NTK(Scaling, name="ntk"):
    """Static NTK-aware scaling: base ``rope_theta * factor ** (d / (d - 2))``.

    *Source*: "NTK-aware scaled RoPE" (bloc97, 2023), described in YaRN, arXiv:2309.00071, sec. 3.1.
    """

    replace_scaling: bool = False

    def __call__(self, slot: RotarySlot) -> RotarySlot:
        """Return the geometric table of the new base."""
        _needs_plain(slot, self, self.replace_scaling)
        return _geometric(slot, frequencies.ntk_theta(slot.rope_theta, self.stretch, slot.rotary_dim))


@dataclass(frozen=True)
class Yarn(Scaling, name="yarn"):
    """YaRN: fast pairs kept, slow pairs interpolated, a ramp between; cos and sin scaled by ``0.1 ln(factor) + 1``.

    *Source*: Peng et al., arXiv:2309.00071. The ramp is transformers', linear in the pair index (the paper's is linear
    in turns; the tables differ by up to 1.9 times at factor 4, more at larger ones). ``attention_factor`` overrides the
    scaling; ``mscale`` and ``mscale_all_dim`` together give DeepSeek's ratio. The scaling multiplies *every* pair, so
    in a chain with p-RoPE the logits of the still pairs grow by its square.
    """

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    original_max_position_embeddings: int | None = None
    replace_scaling: bool = False

    def check(self) -> None:
        """Positive numbers, ``beta_fast`` above ``beta_slow``."""
        super().check()
        for name in ("beta_fast", "beta_slow", "attention_factor", "original_max_position_embeddings"):
            _positive(name, getattr(self, name))
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast must exceed beta_slow, got {self.beta_fast} and {self.beta_slow}")

    def context_of(self, slot: RotarySlot) -> int:
        """Return ``original_max_position_embeddings``, by default the context before any scaling."""
        return self.original_max_position_embeddings or slot.context

    def __call__(self, slot: RotarySlot) -> RotarySlot:
        """Return the NTK-by-parts table over the base found."""
        _needs_plain(slot, self, self.replace_scaling)
        if slot.rope_theta <= 1:
            raise ValueError(f"yarn needs rope_theta > 1, got {slot.rope_theta}")
        context = self.context_of(slot)
        scaling = self.attention_factor
        if scaling is None:
            scaling = frequencies.yarn_scaling(self.stretch, self.mscale, self.mscale_all_dim)
        ramp = {"factor": self.stretch, "beta_fast": self.beta_fast, "beta_slow": self.beta_slow}
        table = frequencies.yarn(slot.rope_theta, slot.rotary_dim, context=context, truncate=self.truncate, **ramp)
        extras = {
            key: value
            for key in ("attention_factor", "mscale", "mscale_all_dim")
            if (value := getattr(self, key)) is not None
        }
        if not self.truncate:
            extras["truncate"] = False
        native = {
            "rope_type": "yarn",
            "rope_theta": slot.rope_theta,
            "original_max_position_embeddings": context,
            **ramp,
            **extras,
        }
        return slot.becomes(table, spelling=native, attention_scaling=scaling)


@dataclass(frozen=True)
class Llama3(Scaling, name="llama3"):
    """Llama 3.1's smoothed interpolation.

    *Source*: transformers' ``llama3`` type. ``original_max_position_embeddings`` defaults to the trained context.
    """

    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None
    replace_scaling: bool = False

    def check(self) -> None:
        """Positive numbers, the high factor above the low one."""
        super().check()
        for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            _positive(name, getattr(self, name))
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor must exceed low_freq_factor, got {self.high_freq_factor} and {self.low_freq_factor}"
            )

    def context_of(self, slot: RotarySlot) -> int:
        """Return ``original_max_position_embeddings``, by default the context before any scaling."""
        return self.original_max_position_embeddings or slot.context

    def __call__(self, slot: RotarySlot) -> RotarySlot:
        """Smooth the plain table."""
        _needs_plain(slot, self, self.replace_scaling)
        context = self.context_of(slot)
        smoothing = {
            "factor": self.stretch,
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
        }
        plain = frequencies.geometric(slot.rope_theta, slot.rotary_dim)
        native = {
            "rope_type": "llama3",
            "rope_theta": slot.rope_theta,
            "original_max_position_embeddings": context,
            **smoothing,
        }
        table = frequencies.llama3(plain, context=context, **smoothing)
        return slot.becomes(table, spelling=native, attention_scaling=1.0)


@dataclass(frozen=True)
class LongRope(Method, name="longrope"):
    """LongRoPE: each frequency divided by a factor of its own; all ones by default.

    ``attention_factor`` defaults to ``sqrt(1 + ln(factor) / ln(L))`` with ``L`` the trained context, which is 1 for the
    default ``factor`` 1. One list only: a short and a long table that differ would switch during generation and break
    cached keys. *Source*: Ding et al., arXiv:2402.13753.
    """

    factors: tuple[float, ...] | None = None
    factor: float = 1.0
    attention_factor: float | None = None
    extends: ClassVar[bool] = True

    def for_target(self, slot: RotarySlot, target_length: int | None) -> LongRope:
        """Return the method: its list decides how far the table reaches.

        Raises:
            ValueError: a target, and no list.
        """
        if target_length is not None and self.factors is None:
            raise ValueError(
                f"longrope without factors leaves the table as it is: it is not made for target_length {target_length}"
            )
        return self

    def check(self) -> None:
        """Every factor is positive."""
        _positive("factor", self.factor)
        _positive("attention_factor", self.attention_factor)
        for value in self.factors or ():
            _positive("factors", value)

    def __call__(self, slot: RotarySlot) -> RotarySlot:
        """Divide the table found by the factors."""
        factors = self.factors if self.factors is not None else (1.0,) * slot.pairs
        _same_length("factors", factors, slot)
        scaling = self.attention_factor
        if scaling is None:
            grown = 1 + math.log(self.factor) / math.log(slot.context) if self.factor > 1 else 1.0
            scaling = math.sqrt(grown) * slot.attention_scaling
        if slot.is_geometric:
            native = longrope_spelling(factors, slot, attention_scaling=scaling)
            return slot.becomes(
                frequencies.longrope(slot.rope_theta, factors), spelling=native, attention_scaling=scaling
            )
        return slot.becomes(slot.inv_freq / frequencies.table_of(factors), attention_scaling=scaling)


def longrope_spelling(factors: Sequence[float], slot: RotarySlot, *, attention_scaling: float) -> dict[str, Any]:
    """Return the longrope form that every stock loader rebuilds one fixed table from.

    Both lists are equal, so nothing switches; ``original_max_position_embeddings`` equals ``max_position_embeddings``,
    so no engine derives a scaling of its own. vLLM takes the scaling from the ``mscale`` keys; they are written only
    where it is not 1, since transformers logs them as unrecognized.
    """
    form = {
        "rope_type": "longrope",
        "rope_theta": slot.rope_theta,
        "short_factor": list(factors),
        "long_factor": list(factors),
        "factor": 1.0,
        "attention_factor": attention_scaling,
        "original_max_position_embeddings": slot.max_position_embeddings,
    }
    if attention_scaling != 1.0:
        form |= {"short_mscale": attention_scaling, "long_mscale": attention_scaling}
    return form


@dataclass(frozen=True)
class Truncated(Method, name="truncated"):
    """Truncated basis: still the slow pairs.

    Two forms. ``cutoff_low``, ``cutoff_high`` and ``floor`` [rad/token] are Giraffe's: ``f >= high`` is kept,
    ``low < f < high`` becomes ``floor``, ``f <= low`` is still (Pal et al., arXiv:2308.10882). ``context`` [tokens]
    stills every pair that never completes a turn within it, ``f < 2 pi / context`` (Jonasson, arXiv:2503.01832, eq. 15,
    used as a cut; also HoPE and the critical dimension of Liu et al. 2024); it defaults to the trained context.
    """

    context: int | None = None
    cutoff_low: float | None = None
    cutoff_high: float | None = None
    floor: float = 0.0

    def check(self) -> None:
        """One form at a time, cutoffs in order."""
        cutoffs = (self.cutoff_low, self.cutoff_high)
        if (self.cutoff_low is None) != (self.cutoff_high is None):
            raise ValueError(f"cutoff_low and cutoff_high come together, got {cutoffs[0]} and {cutoffs[1]}")
        if self.context is not None and self.cutoff_low is not None:
            raise ValueError("truncated takes context or the two cutoffs, not both")
        _positive("context", self.context)
        if self.floor < 0:
            raise ValueError(f"floor must be >= 0 rad/token, got {self.floor}")
        if self.cutoff_low is None and self.floor:
            raise ValueError("floor needs cutoff_low and cutoff_high")
        if (
            self.cutoff_low is not None
            and self.cutoff_high is not None
            and not 0 <= self.cutoff_low <= self.cutoff_high
        ):
            raise ValueError(f"cutoffs must satisfy 0 <= cutoff_low <= cutoff_high, got {cutoffs[0]} and {cutoffs[1]}")

    def __call__(self, slot: RotarySlot) -> RotarySlot:
        """Cut the table found."""
        f = slot.inv_freq
        if self.cutoff_low is not None and self.cutoff_high is not None:
            between = torch.where(f > self.cutoff_low, torch.full_like(f, self.floor), torch.zeros_like(f))
            table = torch.where(f >= self.cutoff_high, f, between)
        else:
            bound = frequencies.offset_frequency_bound(self.context or slot.context)
            table = torch.where(f < bound, torch.zeros_like(f), f)
        return slot if torch.equal(table, f) else slot.becomes(table)


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
        _positive("attention_scaling", self.attention_scaling)

    def __call__(self, slot: RotarySlot) -> RotarySlot:
        """Put the table in."""
        if self.layer_type is not None and slot.layer_type != self.layer_type:
            return slot
        if self.values is None and self.attention_scaling is None:
            return slot
        table = slot.inv_freq
        if self.values is not None:
            _same_length("values", self.values, slot)
            table = frequencies.table_of(self.values)
        return slot.becomes(table, attention_scaling=self.attention_scaling)


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} must be in [{low}, {high}], got {value}")


def _positive(name: str, value: float | None) -> None:
    if value is not None and value <= 0:
        raise ValueError(f"{name} must be > 0, got {value}")


def _same_length(name: str, values: Sequence[float], slot: RotarySlot) -> None:
    if len(values) != slot.pairs:
        raise ValueError(f"{name} needs one number per pair: {slot.path} has {slot.pairs}, got {len(values)}")
