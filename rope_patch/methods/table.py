"""Methods that take one number for each pair: its divisor (LongRoPE), or its frequency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor

from rope_patch import frequencies
from rope_patch.methods.base import Method, number
from rope_patch.tables import RotaryTable


@dataclass(frozen=True)
class _PerPair(Method):
    """Base class of the methods whose first parameter is a list of one number for each pair.

    The list decides how far the table reaches. Without it no frequency changes.
    """

    extends: ClassVar[bool] = True

    def for_target(self, table: RotaryTable, target_length: int | None) -> Method:
        """Return the method unchanged.

        Raises:
            ValueError: there is a target but no list.
        """
        name = fields(self)[0].name
        if target_length is not None and getattr(self, name) is None:
            raise ValueError(
                f"{self.name} without {name} leaves the table as it is: it is not made for target_length "
                f"{target_length}"
            )
        return self


@dataclass(frozen=True)
class LongRope(_PerPair, name="longrope"):
    """LongRoPE: each frequency divided by a factor of its own; all ones by default.

    ``attention_factor`` defaults to ``sqrt(1 + ln(factor) / ln(L))`` with ``L`` the trained context, which is 1 for the
    default ``factor`` 1. There is one list only: a short and a long table that differ would switch during generation,
    and cached keys would no longer fit. *Source*: Ding et al., arXiv:2402.13753.
    """

    factors: tuple[float, ...] | None = number(None, above=0)
    factor: float = number(1.0, above=0)
    attention_factor: float | None = number(None, above=0)

    def check_table(self, table: RotaryTable) -> None:
        """Refuse a table with another number of pairs."""
        _check_count("factors", self.factors, table)

    def inv_freq(self, table: RotaryTable) -> Tensor:
        """Return the frequencies of the checkpoint divided by the factors."""
        # In the order of operations of transformers, which rebuilds the table from these factors to the last bit.
        if table.is_geometric:
            return frequencies.longrope(table.rope_theta, self._factors(table))
        return table.inv_freq / frequencies.table_of(self._factors(table))

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


@dataclass(frozen=True)
class Table(_PerPair, name="table"):
    """Any table, number by number: what a search found, for example. The table found by default.

    ``values`` are frequencies [rad/token], fast to slow, one per pair; ``attention_scaling`` defaults to the one found.
    With a ``layer_type`` the tables of other layers stay as they are, so a chain of such methods gives each layer type
    its own table.
    """

    values: tuple[float, ...] | None = number(None, least=0, unit="rad/token")
    attention_scaling: float | None = number(None, above=0)
    layer_type: str | None = None

    def check_table(self, table: RotaryTable) -> None:
        """Refuse a table with another number of pairs."""
        if self._is_for(table):
            _check_count("values", self.values, table)

    def inv_freq(self, table: RotaryTable) -> Tensor:
        """Return the values, or the frequencies of the checkpoint if there are none for this table."""
        if self.values is None or not self._is_for(table):
            return table.inv_freq
        return frequencies.table_of(self.values)

    def scaling(self, table: RotaryTable) -> float:
        """Return ``attention_scaling``, by default that of the checkpoint."""
        given = self.attention_scaling
        if given is None or not self._is_for(table):
            return table.attention_scaling
        return given

    def _is_for(self, table: RotaryTable) -> bool:
        return self.layer_type in (None, table.layer_type)


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


def _check_count(name: str, values: Sequence[float] | None, table: RotaryTable) -> None:
    """Raise ValueError unless a list, if given, has one number for each pair of a table."""
    if values is not None and len(values) != table.pairs:
        raise ValueError(f"{name} needs one number per pair: {table.path} has {table.pairs}, got {len(values)}")
