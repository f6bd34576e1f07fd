"""A rotary table in numbers, before a method and after it, and the numbers that papers print beside ours.

>>> [entry.ours for entry in papers() if entry.name.startswith("pair 119, query with the token's key")]
[-85.47]
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rope_patch.frequencies import (
    fingerprint,
    geometric,
    granularity,
    granularity_limit,
    ntk_theta,
    offset_angle_bound,
    offset_frequency_bound,
    turns,
    unrotated,
    wavelength,
)
from rope_patch.theory import (
    Features,
    activation,
    activation_curve,
    head_mass,
    nearest_old,
    separation,
    sharpness_for,
    wendler_head,
)

MASS = 0.99
"""Attention that a head must put on its token, at every position, to count as that head."""
MOST = 2.0e9
"""Products of cosines that one search for nearest images may cost, a second or two; beyond it positions are sampled."""


class Fact(NamedTuple):
    """A number of a table, before a method and after it; None where there is none.

    Attributes:
        name: what it is.
        unit: unit of the two values.
        before: value of the table before.
        after: value of the method's table.
        note: what to know of it.
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
class Study:
    """A table, and what a method makes of it.

    Attributes:
        method: method string.
        base: name of the table before.
        rope_theta: base of the table before.
        before: (pairs,) the table of training [rad/token].
        after: (pairs,) the method's table [rad/token].
        attention_scaling: the method's factor on cos and sin.
        trained_length: context of training, at least 2 [tokens].
        length: context in use, at least 2 [tokens].
    """

    method: str
    base: str
    rope_theta: float
    before: Tensor
    after: Tensor
    attention_scaling: float
    trained_length: int
    length: int

    def __post_init__(self) -> None:
        for name in ("trained_length", "length"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name} must be at least 2 tokens, got {getattr(self, name)}")

    @property
    def changed(self) -> bool:
        """Whether the method's table is another than the one before."""
        return not torch.equal(self.before, self.after)

    def facts(self) -> list[Fact]:
        """Return the numbers of both tables."""
        stride = max(1, math.ceil(self.trained_length * self.length * len(self.before) / MOST))
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
            ("Factor of a previous-token head", "", f"Wendler's alpha for {MASS} of attention at every position"),
            (
                "Quarter turn of the slowest pair",
                "tokens",
                "Barbero et al. theorem 6.1: content in it changes sign; none where a pair is unrotated",
            ),
        ]
        values = zip(names, self._numbers(self.before, stride), self._numbers(self.after, stride), strict=True)
        return [Fact(name, unit, before, after, note) for (name, unit, note), before, after in values]

    def _numbers(self, table: Tensor, stride: int) -> list[float | None]:
        rests = unrotated(table)
        turning = table[~rests].double()
        slow = table < offset_frequency_bound(self.trained_length)
        angles = offset_angle_bound(table.double(), self.trained_length)[slow]
        looked = torch.unique(torch.cat([torch.arange(0, self.length, stride), torch.tensor([self.length - 1])]))
        gaps, _ = nearest_old(self.before, table, old_length=self.trained_length, new_positions=looked)
        slowest = float(turning.min()) if len(turning) else 0.0
        try:
            head = sharpness_for(table, *wendler_head(table), mass=MASS, length=self.length)
        except ValueError:  # nothing turns, or by less than float64 can tell
            head = None
        return [
            float(rests.sum()),
            float(wavelength(turning).min()) if len(turning) else None,
            2 * math.pi / slowest if slowest else None,
            self.length * slowest / (2 * math.pi),
            float(slow.sum()),
            float(angles.mean()) if len(angles) else None,
            granularity(table),
            *map(float, separation(table, self.length)),
            float(gaps.max()),
            head,
            math.pi / 2 / slowest if slowest and not bool(rests.any()) else None,
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
            "papers": [{**entry._asdict(), "difference": entry.difference} for entry in papers()],
        }


# --- the papers' numbers ---------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A number of a paper.

    Attributes:
        source: the paper, and the place in it where there is one to name.
        name: what it is, with its unit.
        ours: computed here.
        printed: printed in the paper; None where it prints none.
        note: what to know of it: a slip, an approximation, a condition.
    """

    source: str
    name: str
    ours: float
    printed: float | None = None
    note: str = ""

    @property
    def difference(self) -> float | None:
        """Printed minus ours, relative to ours; None where there is nothing to compare."""
        return None if self.printed is None else (self.printed - self.ours) / abs(self.ours)


PAIR, QUERY, KEY, BOS = 118, (-4.1, 11.3), (11.2, -3.5), (-2.5, 1.3)
"""A head of Gemma 7B that looks for content (Barbero et al. section E.1, where pairs are counted from 1)."""


def in_pair(values: tuple[float, float], pair: int = PAIR, pairs: int = 128) -> Features:
    """Return a vector that is zero but for one pair.

    >>> in_pair((1.0, 2.0), pair=1, pairs=2).tolist()
    [0.0, 1.0, 0.0, 2.0]
    """
    x = torch.zeros(2 * pairs, dtype=torch.float64)
    x[pair], x[pairs + pair] = values
    return x


def papers() -> list[Entry]:
    """Return the papers' numbers, of fixed tables, beside ours, with what each paper leaves out or gets wrong."""
    return [*_barbero(), *_xiong(), *_jonasson()]


def _barbero() -> Iterator[Entry]:
    source, table = "Barbero et al.", geometric(1e4, 256)
    step, slow = float(table[PAIR]), float(geometric(5e5, 128)[40])
    slowest = float(turns(torch.tensor([1e-4]), 128000))
    yield Entry(source, "turns of a pair of 1e-4 rad/token in 128000 tokens", slowest, 2.04)
    yield Entry(source, "frequency of pair 119 of Gemma 7B [rad/token]", step, 2.05e-4, "the paper counts from 1")
    yield Entry(source, "its angle after 8000 tokens [rad]", 8000 * step, 1.64)
    yield Entry(source, "500000^(−40/64) [rad/token]", slow, 1e-4, "printed as 0.0001: 2.7 times too small")
    for name, vector, printed in (("the token's key", KEY, -85.5), ("BOS", BOS, 24.9)):
        here, ahead = activation(table, torch.tensor([0, 8000]), in_pair(QUERY), in_pair(vector)).tolist()
        curve = activation_curve(table, 20000, in_pair(QUERY), in_pair(vector))
        first = int((curve * here < 0).long().argmax())
        note = f"the paper expects that it breaks beyond Gemma's context; it changes sign from {first} tokens on"
        yield Entry(f"{source} §E.1", f"pair 119, query with {name}: activation", here, printed)
        yield Entry(f"{source} §E.1", f"the same, {name} 8000 tokens before", ahead, None, note)
    alike = float(head_mass(torch.zeros(1), torch.ones(2), torch.ones(2), length=2)[1])
    name, note = "without rotation: most attention one of two equal tokens can get", "less beside other tokens"
    yield Entry(f"{source} proposition 5.2", name, alike, 0.5, note)


def _xiong() -> Iterator[Entry]:
    source, plain = "Xiong et al. theorem 1", geometric(1e4, 128)
    tables = {"RoPE": plain, "PI 1/4": plain / 4, "ABF 50": geometric(5e5, 128)}
    pi, abf = granularity_limit(1e4, factor=4.0), granularity_limit(1e4, beta=50.0)
    for name, limit, printed, note in (
        ("RoPE", granularity_limit(1e4), None, "C_d is printed as a bare sum; it is the mean that converges"),
        ("PI 1/4", pi, 0.027, "printed is α / ln b, 0.4 % high before rounding"),
        ("ABF 50", abf, 0.076, "printed is 1 / (ln b + ln β), 5.7 % high before rounding"),
    ):
        yield Entry(source, f"{name}: mean sine of consecutive images, d → ∞", limit, printed, note)
        yield Entry(source, f"{name}: the same, d = 128", granularity(tables[name]))
    slowed = float(plain[1] / tables["ABF 50"][1])
    yield Entry("Xiong et al.", "ABF 50 slows pair 1 by, d = 128", slowed, 1.06, "“only 6 %”")
    for name, table in (tables | {"NTK 4": geometric(ntk_theta(1e4, 4.0, 128), 128)}).items():
        gaps, _ = nearest_old(plain, table, old_length=512, new_positions=torch.arange(2048))
        note = "d as printed, smallest over both positions, is 0 for every method" if name == "RoPE" else ""
        name = f"{name}: farthest new image, 512 → 2048 tokens"
        yield Entry("Xiong et al. d(f, f̂)", name, float(gaps.max()), None, note)


def _jonasson() -> Iterator[Entry]:
    for name, dim, context, share, mean in (("Phi-1", 32, 2048, 0.31, 3.93), ("Llama-2-7B", 128, 4096, 0.28, 4.19)):
        table = geometric(1e4, dim)
        under = table < offset_frequency_bound(context)
        angle = float(offset_angle_bound(table.double(), context)[under].mean())
        yield Entry(
            "Jonasson eq. 15", f"{name}: share of pairs without a full turn", float(under.double().mean()), share
        )
        yield Entry("Jonasson eq. 16", f"{name}: mean lower angle bound [rad]", angle, mean)
    angle, note = 2048 * float(geometric(1e4, 32)[10]), "6.380 is its angle bound π + L·f/2; both exceed 2π"
    yield Entry("Jonasson", "Phi-1: L·f of pair 10 [rad]", angle, 6.38, note)
