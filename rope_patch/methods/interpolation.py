"""Methods that slow pairs: by another base, all by one factor, by how often a pair turns, or by its wavelength."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from rope_patch import frequencies
from rope_patch.methods.base import Method, Scaling, number, restated
from rope_patch.tables import RotaryTable


class _OtherBase(Method):
    """Base class of the methods that compute plain RoPE of another base."""

    recomputes: ClassVar[bool] = True

    def base(self, table: RotaryTable) -> float:
        """Return the new base."""
        raise NotImplementedError

    def inv_freq(self, table: RotaryTable) -> Tensor:
        """Return the geometric table of the new base."""
        return frequencies.geometric(self.base(table), table.rotary_dim)

    def rope_parameters(self, table: RotaryTable) -> dict[str, Any]:
        """Return the parameters of plain RoPE with the new base."""
        return {"rope_type": "default", "rope_theta": self.base(table)}


@dataclass(frozen=True)
class ABF(_OtherBase, name="abf"):
    """Adjusted base frequency: recompute the table from a larger base.

    Give ``rope_theta``, or ``factor`` to multiply the base found. *Source*: Xiong et al., arXiv:2309.16039
    (10k to 500k).
    """

    rope_theta: float | None = number(None, above=0)
    factor: float | None = number(None, above=0)
    extends: ClassVar[bool] = True

    def check(self) -> None:
        """Raise unless at most one of the two is given; without either, the base is 500000."""
        if self.rope_theta is not None and self.factor is not None:
            raise ValueError(f"abf takes rope_theta or factor, not both: got {self.rope_theta} and {self.factor}")
        if self.rope_theta is None and self.factor is None:
            object.__setattr__(self, "rope_theta", 500000.0)

    def base(self, table: RotaryTable) -> float:
        """Return the new base."""
        if self.rope_theta is not None:
            return self.rope_theta
        return table.rope_theta * (self.factor or 1.0)

    def on_scaled(self, table: RotaryTable) -> RotaryTable | None:
        """Return the table of the checkpoint's own type under the new base."""
        return restated(table, rope_theta=self.base(table))


@dataclass(frozen=True)
class NTK(Scaling, _OtherBase, name="ntk"):
    """Static NTK-aware scaling: base ``rope_theta * factor ** (d / (d - 2))``.

    *Source*: "NTK-aware scaled RoPE" (bloc97, 2023), described in YaRN, arXiv:2309.00071, sec. 3.1.
    """

    def base(self, table: RotaryTable) -> float:
        """Return the new base."""
        return frequencies.ntk_theta(table.rope_theta, self.stretch, table.rotary_dim)


@dataclass(frozen=True)
class PI(Scaling, name="pi"):
    """Position interpolation: every frequency divided by ``factor``.

    A table that is scaled already is divided as it is. *Source*: Chen et al., arXiv:2306.15595; the factor is 1/alpha
    in arXiv:2309.16039.
    """

    own_types: ClassVar[tuple[str, ...]] = ("linear", "proportional")

    def inv_freq(self, table: RotaryTable) -> Tensor:
        """Return the frequencies of the checkpoint divided by the factor."""
        return table.inv_freq / self.stretch

    def rope_parameters(self, table: RotaryTable) -> dict[str, Any] | None:
        """Return parameters of type ``linear``; None if the table is not plain RoPE, which alone that type divides."""
        if not table.is_geometric:
            return None
        return {"rope_type": "linear", "rope_theta": table.rope_theta, "factor": self.stretch}


@dataclass(frozen=True)
class _ByTurns(Scaling):
    """Base class of YaRN and MrRoPE, which divide a pair according to how often it turns in the trained context."""

    beta_fast: float = number(32.0, above=0)
    beta_slow: float = number(1.0, above=0)
    attention_factor: float | None = number(None, above=0)
    original_max_position_embeddings: int | None = number(None, above=0)
    recomputes: ClassVar[bool] = True
    ends: ClassVar[tuple[str, ...]] = ("beta_fast", "beta_slow")

    def check_table(self, table: RotaryTable) -> None:
        """Refuse a base with which the number of turns does not fall from pair to pair."""
        if table.rope_theta <= 1:
            raise ValueError(f"{self.name} needs rope_theta > 1, got {table.rope_theta}")

    def scaling(self, table: RotaryTable) -> float:
        """Return ``attention_factor``, or what YaRN computes from the factor."""
        if self.attention_factor is not None:
            return self.attention_factor
        return frequencies.yarn_scaling(self.stretch)

    def _ramp(self, table: RotaryTable) -> dict[str, Any]:
        """Return the arguments that decide by how much each pair is divided."""
        ends = {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow}
        return {"factor": self.stretch, "context": self.context_of(table), **ends}


@dataclass(frozen=True)
class Yarn(_ByTurns, name="yarn"):
    """YaRN: fast pairs kept, slow pairs interpolated, a ramp between; cos and sin scaled by ``0.1 ln(factor) + 1``.

    *Source*: Peng et al., arXiv:2309.00071. The ramp is transformers', linear in the pair index (the paper's is linear
    in turns; the tables differ by up to 1.9 times at factor 4, more at larger ones). ``attention_factor`` overrides the
    scaling; ``mscale`` and ``mscale_all_dim`` together give DeepSeek's ratio. The scaling multiplies *every* pair, so
    in a chain with p-RoPE the logits of the unrotated pairs grow by its square.
    """

    own_types: ClassVar[tuple[str, ...]] = ("yarn",)
    truncate: bool = True
    mscale: float | None = number(None, least=0)
    mscale_all_dim: float | None = number(None, least=0)

    def inv_freq(self, table: RotaryTable) -> Tensor:
        """Return the NTK-by-parts table of the checkpoint's base."""
        return frequencies.yarn(table.rope_theta, table.rotary_dim, truncate=self.truncate, **self._ramp(table))

    def scaling(self, table: RotaryTable) -> float:
        """Return ``attention_factor``, or what YaRN computes from the factor and the ``mscale`` arguments."""
        if self.attention_factor is not None:
            return self.attention_factor
        return frequencies.yarn_scaling(self.stretch, self.mscale, self.mscale_all_dim)

    def rope_parameters(self, table: RotaryTable) -> dict[str, Any]:
        """Return parameters of type ``yarn``, without those that are at transformers' own default."""
        given = {name: getattr(self, name) for name in ("attention_factor", "mscale", "mscale_all_dim")}
        if not self.truncate:
            given["truncate"] = False
        return {
            "rope_type": "yarn",
            "rope_theta": table.rope_theta,
            "original_max_position_embeddings": self.context_of(table),
            "factor": self.stretch,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            **{name: value for name, value in given.items() if value is not None},
        }


@dataclass(frozen=True)
class MrRope(_ByTurns, name="mrrope"):
    """MrRoPE-Pro: YaRN's ends, with divisors between them that grow slowly at first and fast at the slow end.

    cos and sin are scaled as in YaRN, ``0.1 ln(factor) + 1``; ``attention_factor`` overrides that. *Source*:
    arXiv:2601.22181, eq. 14 to 16; rounding and scaling are those of the authors' code (mattian7/mrRoPE at d1a6f31).
    """

    def inv_freq(self, table: RotaryTable) -> Tensor:
        """Return MrRoPE-Pro's table of the checkpoint's base."""
        return frequencies.mrrope(table.rope_theta, table.rotary_dim, **self._ramp(table))


@dataclass(frozen=True)
class Llama3(Scaling, name="llama3"):
    """Llama 3.1's smoothed interpolation.

    *Source*: transformers' ``llama3`` type. ``original_max_position_embeddings`` defaults to the trained context.
    """

    low_freq_factor: float = number(1.0, above=0)
    high_freq_factor: float = number(4.0, above=0)
    original_max_position_embeddings: int | None = number(None, above=0)
    recomputes: ClassVar[bool] = True
    own_types: ClassVar[tuple[str, ...]] = ("llama3",)
    ends: ClassVar[tuple[str, ...]] = ("high_freq_factor", "low_freq_factor")

    def inv_freq(self, table: RotaryTable) -> Tensor:
        """Return the plain table of the checkpoint's base with Llama 3.1's smoothing."""
        plain = frequencies.geometric(table.rope_theta, table.rotary_dim)
        return frequencies.llama3(plain, context=self.context_of(table), **self._smoothing())

    def rope_parameters(self, table: RotaryTable) -> dict[str, Any]:
        """Return parameters of type ``llama3``."""
        context = self.context_of(table)
        given = {"rope_type": "llama3", "rope_theta": table.rope_theta, "original_max_position_embeddings": context}
        return given | self._smoothing()

    def _smoothing(self) -> dict[str, float]:
        return {
            "factor": self.stretch,
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
        }
