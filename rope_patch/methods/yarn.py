"""YaRN, and what it shares with MrRoPE."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rope_patch.frequencies import (
    InvFreq,
    check_rotary_dim,
    position_base,
)
from rope_patch.methods.method import Method, number
from rope_patch.methods.scaling import Scaling
from rope_patch.tables import RotaryTable


def yarn_scaling(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """Return YaRN's attention factor, on cos and sin: ``0.1 ln(factor) + 1``, and 1 for factors up to 1.

    With both ``mscale`` arguments it is the ratio of the two scaled forms (DeepSeek). *Source*: YaRN,
    arXiv:2309.00071, eq. 22, as transformers computes it.

    >>> round(yarn_scaling(4.0), 4), yarn_scaling(0.5)
    (1.1386, 1.0)
    """
    if factor <= 1:
        return 1.0
    log = math.log(factor)
    if mscale and mscale_all_dim:
        return (0.1 * mscale * log + 1.0) / (0.1 * mscale_all_dim * log + 1.0)
    return 0.1 * log + 1.0


def yarn_table(
    rope_theta: float,
    rotary_dim: int,
    *,
    factor: float,
    context: int,
    beta_fast: float = 32,
    beta_slow: float = 1,
    truncate: bool = True,
) -> InvFreq:
    """Return YaRN's NTK-by-parts table.

    Pairs that turn more than ``beta_fast`` times within ``context`` keep their frequency, pairs that turn less than
    ``beta_slow`` times are divided by ``factor``, and a ramp joins the two. *Source*: YaRN, arXiv:2309.00071, sec. 3.2.
    The ramp is transformers', linear in the pair *index*, where the paper's is linear in turns: in the middle the two
    tables differ by up to 1.9 times at factor 4, and more at larger factors.

    Args:
        rope_theta: the base of the unscaled table.
        rotary_dim: the number of features that rotate, even.
        factor: the factor by which the context is extended.
        context: the context that the model was trained with [tokens].
        beta_fast: the number of turns within the context above which a pair keeps its frequency.
        beta_slow: the number of turns within the context below which a pair is divided by ``factor``.
        truncate: whether the ends of the ramp are rounded outwards to whole pairs.
    """
    check_rotary_dim(rotary_dim)
    low, high = ramp_ends(rope_theta, rotary_dim, context, beta_fast, beta_slow, truncate)
    # As in transformers: a ramp without width would divide by 0.
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low), 0, 1)
    base = position_base(rope_theta, rotary_dim)
    # 1 - share is not written as ramp, which differs in the last bit: this is transformers' order of operations.
    share = 1 - ramp
    return 1.0 / (factor * base) * (1 - share) + 1.0 / base * share


def ramp_ends(
    rope_theta: float, rotary_dim: int, context: int, beta_fast: float, beta_slow: float, truncate: bool = True
) -> tuple[float, float]:
    """Return the pairs that turn ``beta_fast`` and ``beta_slow`` times in a context; ``truncate`` rounds outwards."""

    def pair_turning(rotations: float) -> float:
        # The i for which context * rope_theta ** (-2 i / rotary_dim) is 2 pi * rotations.
        return (rotary_dim * math.log(context / (rotations * 2 * math.pi))) / (2 * math.log(rope_theta))

    low = pair_turning(beta_fast)
    high = pair_turning(beta_slow)
    if truncate:
        low = math.floor(low)
        high = math.ceil(high)
    # Transformers bounds the index of a pair by the number of features, which is twice as many; so do we, to equal it.
    return max(low, 0), min(high, rotary_dim - 1)


@dataclass(frozen=True)
class ByTurns(Scaling):
    """Base class of YaRN and MrRoPE, which divide a pair according to how often it turns in the trained context.

    Args:
        beta_fast: pairs that make more full turns than this within the trained context keep their frequency.
        beta_slow: pairs that make fewer full turns than this are divided by the whole factor.
        attention_factor: the factor on cos and sin; left out, the method computes it.
        original_max_position_embeddings: the context before any scaling; left out, the one that the checkpoint says.
    """

    beta_fast: float = number(32.0, above=0)
    beta_slow: float = number(1.0, above=0)
    attention_factor: float | None = number(None, above=0)
    original_max_position_embeddings: int | None = number(None, above=0)
    recomputes = True
    ends = ("beta_fast", "beta_slow")

    def check_table(self, table: RotaryTable) -> None:
        """Refuse a base with which the number of turns does not fall from pair to pair."""
        if table.rope_theta <= 1:
            raise ValueError(f"{self.name} needs rope_theta > 1, got {table.rope_theta}")

    def scaling(self, table: RotaryTable) -> float:
        """Return ``attention_factor``, or what YaRN computes from the factor."""
        if self.attention_factor is not None:
            return self.attention_factor
        return yarn_scaling(self.stretch)

    def with_factor(self, factor: float, table: RotaryTable) -> Method:
        """Return the method with the factor, and with DeepSeek's ratio where the scaled table has it.

        Attention of such a family scales its logits, too, so that cos and sin keep the ratio of the two.
        """
        stated = table.rope_parameters or {}
        both = [stated.get(name) for name in ("mscale", "mscale_all_dim")]
        attention = self.attention_factor
        if all(both) and attention is None:
            attention = yarn_scaling(factor, *both)
        return replace(self, factor=factor, attention_factor=attention)

    def arguments(self, table: RotaryTable) -> dict[str, Any]:
        """Return the arguments that decide by how much each pair is divided."""
        ends = {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow}
        return {"factor": self.stretch, "context": self.context_of(table), **ends}


@dataclass(frozen=True)
class Yarn(ByTurns, name="yarn"):
    """YaRN: fast pairs kept, slow pairs interpolated, a ramp between; cos and sin scaled by ``0.1 ln(factor) + 1``.

    *Source*: Peng et al., arXiv:2309.00071. The ramp is transformers', linear in the pair index (the paper's is linear
    in turns; the tables differ by up to 1.9 times at factor 4, more at larger ones). ``attention_factor`` overrides the
    scaling; ``mscale`` and ``mscale_all_dim`` together give DeepSeek's ratio. The scaling multiplies *every* pair, so
    in a chain with p-RoPE the logits of the unrotated pairs grow by its square.

    Args:
        truncate: whether both ends of the ramp are rounded outwards to whole pairs.
        mscale: with ``mscale_all_dim``: DeepSeek's ratio on cos and sin.
        mscale_all_dim: with ``mscale``: DeepSeek's ratio on cos and sin.
    """

    own_types = ("yarn",)
    truncate: bool = True
    mscale: float | None = number(None, least=0)
    mscale_all_dim: float | None = number(None, least=0)

    def inv_freq(self, table: RotaryTable) -> Tensor:
        """Return the NTK-by-parts table of the checkpoint's base."""
        return yarn_table(table.rope_theta, table.rotary_dim, truncate=self.truncate, **self.arguments(table))

    def scaling(self, table: RotaryTable) -> float:
        """Return ``attention_factor``, or what YaRN computes from the factor and the ``mscale`` arguments."""
        if self.attention_factor is not None:
            return self.attention_factor
        return yarn_scaling(self.stretch, self.mscale, self.mscale_all_dim)

    def with_factor(self, factor: float, table: RotaryTable) -> Method:
        """Return the method with the factor; a ratio that is given stands before that of the scaled table."""
        if self.mscale:
            return replace(self, factor=factor)
        return super().with_factor(factor, table)

    def following(self, stated: Mapping[str, Any], factor: float) -> dict[str, Any]:
        """Return ``attention_factor`` if it is what the factor implies; any other is a setting, and is kept."""
        attention = stated.get("attention_factor")
        if attention is not None and math.isclose(attention, yarn_scaling(factor), rel_tol=1e-6):
            return {"attention_factor": yarn_scaling(factor * self.stretch)}
        return {}

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
