"""A rotary table in numbers, before a method and after it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rope_patch.frequencies import (
    fingerprint,
    granularity,
    offset_angle_bound,
    offset_frequency_bound,
    unrotated,
    wavelength,
)
from rope_patch.theory import nearest_old, previous_token_factor, separation

HEAD_ATTENTION = 0.99
"""Attention that a head must put on its token, at every position, to count as that head."""
MOST_PRODUCTS = 2.0e9
"""Products of cosines that one search for nearest images may cost, a second or two; beyond it positions are sampled."""


class Fact(NamedTuple):
    """A number of a table, before a method and after it; None where there is none.

    Attributes:
        name: the name of the quantity.
        unit: the unit of both values; empty where they have none.
        before: the value for the table before.
        after: the value for the method's table.
        note: the source of the quantity, or what to know when reading it.
    """

    name: str
    unit: str
    before: float | None
    after: float | None
    note: str = ""

    @property
    def label(self) -> str:
        """The name with its unit."""
        return f"{self.name} [{self.unit}]" if self.unit else self.name


@dataclass(frozen=True, eq=False)
class TableFacts:
    """A table, and what a method makes of it.

    Attributes:
        method: the method string of the method that is studied.
        base: the name of the table before.
        rope_theta: the base of the table before.
        before: (pairs,) the table that the model was trained with [rad/token].
        after: (pairs,) the table that the method makes of it [rad/token].
        attention_scaling: the method's attention factor, by which cos and sin are multiplied.
        trained_length: the context that the model was trained with, at least 2 [tokens].
        length: the context in which the method's table is used, at least 2 [tokens].
    """

    method: str
    base: str
    rope_theta: float
    before: Tensor
    after: Tensor
    attention_scaling: float
    trained_length: int
    length: int

    @property
    def changed(self) -> bool:
        """Whether the method's table is another than the one before."""
        return not torch.equal(self.before, self.after)

    def facts(self) -> list[Fact]:
        """Return the numbers of both tables."""
        stride = max(1, math.ceil(self.trained_length * self.length * len(self.before) / MOST_PRODUCTS))
        sampled = "" if stride == 1 else f"; one new position in {stride} looked at, so at least this"
        names = [
            ("Unrotated pairs", f"of {len(self.before)}", ""),
            ("Fastest wavelength", "tokens", ""),
            ("Slowest wavelength of a pair that turns", "tokens", ""),
            ("Turns of that pair within the length", "turns", "Barbero et al.; below 1 it never comes round"),
            ("Pairs under Jonasson's frequency bound", f"of {len(self.before)}", "no full turn in the trained length"),
            ("Their mean lower angle bound", "rad", "Jonasson eq. 16"),
            ("Mean sine of consecutive images", "", "Xiong et al. theorem 1, pairs of equal norm"),
            ("Closest two images within the length", "", "Xiong et al.'s q; unit vector, pairs of equal norm"),
            ("Their positions are apart by", "tokens", "1 is what Xiong et al. assume"),
            ("Farthest new image from its nearest old one", "", f"Xiong et al.'s d, changed; unit vector{sampled}"),
            (
                "Factor of a previous-token head",
                "",
                f"Wendler's alpha for {HEAD_ATTENTION} of attention at every position",
            ),
            (
                "Quarter turn of the slowest pair",
                "tokens",
                "Barbero et al. theorem 6.1: content in it changes sign; none where a pair is unrotated",
            ),
        ]
        values = zip(names, self._numbers(self.before, stride), self._numbers(self.after, stride), strict=True)
        return [Fact(name, unit, before, after, note) for (name, unit, note), before, after in values]

    def _numbers(self, table: Tensor, stride: int) -> list[float | None]:
        is_unrotated = unrotated(table)
        turning = table[~is_unrotated].double()
        slow = table < offset_frequency_bound(self.trained_length)
        angles = offset_angle_bound(table.double(), self.trained_length)[slow]
        # Steps of the stride may miss the last position, which is always looked at.
        looked = torch.unique(torch.cat([torch.arange(0, self.length, stride), torch.tensor([self.length - 1])]))
        gaps = nearest_old(self.before, table, old_length=self.trained_length, new_positions=looked)
        slowest = float(turning.min()) if len(turning) else 0.0
        return [  # in the order of the names in `facts`
            float(is_unrotated.sum()),
            float(wavelength(turning).min()) if len(turning) else None,
            2 * math.pi / slowest if slowest else None,
            self.length * slowest / (2 * math.pi),
            float(slow.sum()),
            float(angles.mean()) if len(angles) else None,
            granularity(table),
            *map(float, separation(table, self.length)),
            float(gaps.max()),
            previous_token_factor(table, mass=HEAD_ATTENTION, length=self.length),
            math.pi / 2 / slowest if slowest and not bool(is_unrotated.any()) else None,
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "method": self.method,
            "base": self.base,
            "head_dim": 2 * len(self.before),
            "rope_theta": self.rope_theta,
            "trained_length": self.trained_length,
            "length": self.length,
            "attention_scaling": self.attention_scaling,
            "hash": fingerprint(self.after, self.attention_scaling),
            "inv_freq": self.after.tolist(),
            "table": [fact._asdict() for fact in self.facts()],
        }
