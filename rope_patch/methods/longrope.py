"""LongRoPE: a factor for each pair; and the form in which any table can be written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from rope_patch.frequencies import (
    UNROTATED_FACTOR,
    InvFreq,
    position_base,
    table_of,
    unrotated,
    zero_unrotated,
)
from rope_patch.methods.method import Method, number
from rope_patch.tables import RotaryTable


def longrope_table(rope_theta: float, factors: Sequence[float]) -> InvFreq:
    """Return the table transformers builds from longrope ``factors``, ``1 / (factors * rope_theta ** (2 i / d))``.

    >>> longrope_table(10000.0, [1.0, 2.0, 1e39]).tolist()
    [1.0, 0.02320794202387333, 0.0]
    """
    return 1.0 / (table_of(factors) * position_base(rope_theta, 2 * len(factors)))


def longrope_factors(inv_freq: InvFreq, rope_theta: float) -> list[float]:
    """Return factors from which transformers rebuilds the table, to the last bit where float32 allows it.

    A naive quotient is off by one unit in the last place for some pairs. So the float32 neighbours of the quotient are
    searched for one that :func:`longrope_table` turns into the wanted frequency; where none does, the nearest is taken,
    and the rebuilt table is the canonical one. Canonicalising a canonical table changes nothing.
    """
    base = position_base(rope_theta, 2 * len(inv_freq))
    target = zero_unrotated(inv_freq.float().cpu())
    # In float64, so that only the last step rounds.
    guess = (1.0 / (target.double() * base.double())).float()
    # The bits of a positive number, read as a whole number, are one less and one more than those of its neighbours.
    steps = torch.tensor([[0], [1], [-1], [2], [-2]], dtype=torch.int32, device="cpu")
    factors = (guess.view(torch.int32) + steps).view(torch.float32)
    miss = (1.0 / (factors * base) - target).abs().double()
    best = factors[miss.argmin(dim=0), torch.arange(len(target), device="cpu")]
    # In float64, since the divisor of an unrotated pair is no float32.
    numbers: list[float] = best.double().masked_fill(unrotated(target), UNROTATED_FACTOR).tolist()
    return numbers


@dataclass(frozen=True)
class PerPair(Method):
    """Base class of the methods whose first parameter is a list of one number for each pair.

    The list decides how far the table reaches. Without it no frequency changes.
    """

    extends = True

    def check_table(self, table: RotaryTable) -> None:
        """Refuse a table with another number of pairs."""
        name = fields(self)[0].name
        values = getattr(self, name)
        if values is not None and len(values) != table.pairs:
            raise ValueError(f"{name} needs one number per pair: {table.path} has {table.pairs}, got {len(values)}")

    def for_target(self, table: RotaryTable, target_length: int | None) -> Method:
        """Return the method unchanged.

        Raises:
            ValueError: there is a target but no list.
        """
        name = fields(self)[0].name
        if target_length is not None and getattr(self, name) is None:
            raise ValueError(
                f"{self.name} without {name} leaves the table as it is, so it does not reach target_length "
                f"{target_length}"
            )
        return self


@dataclass(frozen=True)
class LongRope(PerPair, name="longrope"):
    """LongRoPE: a divisor for each frequency; by default all are 1.

    ``attention_factor`` defaults to ``sqrt(1 + ln(factor) / ln(L))`` with ``L`` the trained context, which is 1 for the
    default ``factor`` 1. There is one list only: a short and a long table that differ would switch during generation,
    and cached keys would no longer fit. *Source*: Ding et al., arXiv:2402.13753.

    Args:
        factors: a divisor for each pair, fast to slow, joined by ``/``; left out, all are 1.
        factor: sets the default of ``attention_factor`` and nothing else.
        attention_factor: the factor on cos and sin; left out, the method computes it.
    """

    factors: tuple[float, ...] | None = number(None, above=0)
    factor: float = number(1.0, above=0)
    attention_factor: float | None = number(None, above=0)

    def inv_freq(self, table: RotaryTable) -> Tensor:
        """Return the frequencies of the checkpoint divided by the factors."""
        # In the order of operations of transformers, which rebuilds the table from these factors to the last bit.
        if table.is_geometric:
            return longrope_table(table.rope_theta, self._factors(table))
        return table.inv_freq / table_of(self._factors(table))

    def scaling(self, table: RotaryTable) -> float:
        """Return ``attention_factor``, or the checkpoint's scaling times what LongRoPE computes from the factor."""
        if self.attention_factor is not None:
            return self.attention_factor
        grown = 1.0
        if self.factor > 1:
            grown += math.log(self.factor) / math.log(table.context)
        return math.sqrt(grown) * table.attention_scaling

    def rope_parameters(self, table: RotaryTable) -> dict[str, Any] | None:
        """Return parameters of type ``longrope``; None if the table is not plain RoPE, which is all it divides."""
        if not table.is_geometric:
            return None
        return longrope_parameters(self._factors(table), table, attention_scaling=self.scaling(table))

    def _factors(self, table: RotaryTable) -> tuple[float, ...]:
        return (1.0,) * table.pairs if self.factors is None else self.factors


def longrope_parameters(factors: Sequence[float], table: RotaryTable, *, attention_scaling: float) -> dict[str, Any]:
    """Return the longrope parameters from which every loader of transformers rebuilds one fixed table.

    Both lists are equal, so nothing switches; ``original_max_position_embeddings`` equals ``max_position_embeddings``,
    so no engine derives a scaling of its own. vLLM takes the scaling from the ``mscale`` keys; they are written only
    where it is not 1, since transformers logs them as unrecognized.
    """
    form = {
        "rope_type": "longrope",
        "rope_theta": table.rope_theta,
        "short_factor": list(factors),
        "long_factor": list(factors),
        "factor": 1.0,
        "attention_factor": attention_scaling,
        "original_max_position_embeddings": table.max_position_embeddings,
    }
    if attention_scaling != 1.0:
        form |= {"short_mscale": attention_scaling, "long_mscale": attention_scaling}
    return form


def longrope_form(table: RotaryTable) -> tuple[InvFreq, dict[str, Any]]:
    """Return a table as it is rebuilt from its longrope factors, and the longrope parameters that state it."""
    factors = longrope_factors(table.inv_freq, table.rope_theta)
    form = longrope_parameters(factors, table, attention_scaling=table.attention_scaling)
    return longrope_table(table.rope_theta, factors), form
