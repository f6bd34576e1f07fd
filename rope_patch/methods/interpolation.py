"""Methods that divide frequencies by a factor: all alike, or by how often a pair turns."""

from __future__ import annotations

from dataclasses import dataclass

from rope_patch import frequencies
from rope_patch.methods.base import (
    Scaling,
    check_plain,
    check_positive,
    with_base,
)
from rope_patch.tables import RotarySlot


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
            slot = with_base(slot, slot.rope_theta)
        if slot.rope_type == "linear":
            scaled = (slot.rope_parameters or {}).get("factor")
            raise ValueError(
                f"{slot.path} is already interpolated (rope_type 'linear', factor {scaled}): a second pi would "
                "multiply the factors. Pass replace_scaling=True with the whole factor."
            )
        native = {"rope_type": "linear", "rope_theta": slot.rope_theta, "factor": self.stretch}
        return slot.becomes(slot.inv_freq / self.stretch, spelling=native if slot.is_geometric else None)


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
            check_positive(name, getattr(self, name))
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast must exceed beta_slow, got {self.beta_fast} and {self.beta_slow}")

    def context_of(self, slot: RotarySlot) -> int:
        """Return ``original_max_position_embeddings``, by default the context before any scaling."""
        return self.original_max_position_embeddings or slot.context

    def __call__(self, slot: RotarySlot) -> RotarySlot:
        """Return the NTK-by-parts table over the base found."""
        check_plain(slot, self, self.replace_scaling)
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
            check_positive(name, getattr(self, name))
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor must exceed low_freq_factor, got {self.high_freq_factor} and {self.low_freq_factor}"
            )

    def context_of(self, slot: RotarySlot) -> int:
        """Return ``original_max_position_embeddings``, by default the context before any scaling."""
        return self.original_max_position_embeddings or slot.context

    def __call__(self, slot: RotarySlot) -> RotarySlot:
        """Smooth the plain table."""
        check_plain(slot, self, self.replace_scaling)
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
