"""The theory of a table in numbers: what the papers print beside what we compute, and one table beside plain RoPE.

>>> result = study("pi:factor=4", head_dim=64, trained_length=512, length=2048)
>>> round(next(fact.after for fact in result.facts if fact.name.startswith("Mean sine")), 4)
0.0311
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rope_patch import __version__, theory
from rope_patch.frequencies import (
    fingerprint,
    geometric,
    granularity,
    offset_angle_bound,
    offset_frequency_bound,
    unrotated,
    wavelength,
)
from rope_patch.methods import MethodLike, as_method
from rope_patch.tables import RotaryTable
from rope_patch.theory.papers import Entry, papers

SCHEMA = 1
MASS = 0.99
"""Attention a head must put on its token, at every position, to count as that head."""

MOST = 2.0e9
"""Products of cosines one search for nearest images may cost, a second or two; beyond it new positions are sampled."""


class Fact(NamedTuple):
    """A number of a table, plain and as the method leaves it; None where there is none.

    Attributes:
        name: what it is.
        unit: of the two values.
        before: of the plain table.
        after: of the method's.
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
    """A study of one table.

    Attributes:
        method: as a method string.
        head_dim: features of a head, all of them in the table.
        rope_theta: base of the plain table.
        trained_length: context of the plain table [tokens].
        length: context in use [tokens].
        before: (pairs,) the plain table [rad/token].
        after: (pairs,) the method's table [rad/token].
        attention_scaling: the method's factor on cos and sin.
        facts: of the two tables.
        papers: the papers' numbers, which depend on none of the above.
    """

    method: str
    head_dim: int
    rope_theta: float
    trained_length: int
    length: int
    before: Tensor
    after: Tensor
    attention_scaling: float
    facts: tuple[Fact, ...]
    papers: tuple[Entry, ...]

    @property
    def changed(self) -> bool:
        """Whether the method's table is another than the plain one."""
        return not torch.equal(self.before, self.after)

    def to_json(self) -> str:
        """Return everything as standard JSON."""
        data = {
            "schema": SCHEMA,
            "rope_patch": __version__,
            "method": self.method,
            "head_dim": self.head_dim,
            "rope_theta": self.rope_theta,
            "trained_length": self.trained_length,
            "length": self.length,
            "attention_scaling": self.attention_scaling,
            "hash": fingerprint(self.after, self.attention_scaling),
            "inv_freq": self.after.tolist(),
            "table": [fact._asdict() for fact in self.facts],
            "papers": [{**entry._asdict(), "difference": entry.difference} for entry in self.papers],
        }
        return json.dumps(data, indent=2, allow_nan=False)


def study(
    method: MethodLike = "default",
    *,
    head_dim: int = 128,
    rope_theta: float = 10000.0,
    trained_length: int = 4096,
    length: int = 16384,
) -> Study:
    """Return what theory says of the table that a method makes of plain RoPE.

    Args:
        method: a method or a method string.
        head_dim: features of a head, all of them rotary, even.
        rope_theta: base of the plain table, > 1.
        trained_length: context of training [tokens].
        length: context in use [tokens].

    Raises:
        ValueError: an argument out of range, or a method that cannot be applied.
    """
    if not (math.isfinite(rope_theta) and rope_theta > 1):
        raise ValueError(f"rope_theta must be a finite number > 1, got {rope_theta}")
    for name, value in (("trained_length", trained_length), ("length", length)):
        if value < 2:
            raise ValueError(f"{name} must be at least 2 tokens, got {value}")
    before = geometric(rope_theta, head_dim)
    slot = RotaryTable(before, 1.0, rope_theta, "default", trained_length)
    patch = as_method(method).for_target(slot, max(length, trained_length) if as_method(method).needs_target else None)
    patched = patch(slot)
    return Study(
        str(patch),
        head_dim,
        rope_theta,
        trained_length,
        length,
        before,
        patched.inv_freq,
        patched.attention_scaling,
        facts(before, patched.inv_freq, trained_length=trained_length, length=length),
        papers(),
    )


def facts(before: Tensor, after: Tensor, *, trained_length: int, length: int) -> tuple[Fact, ...]:
    """Return the numbers of a table beside those of the one before.

    Args:
        before: (pairs,) the table of training [rad/token].
        after: (pairs,) the table in use [rad/token].
        trained_length: context of training [tokens].
        length: context in use [tokens].
    """
    stride = max(1, math.ceil(trained_length * length * len(before) / MOST))
    looked = torch.unique(torch.cat([torch.arange(0, length, stride), torch.tensor([length - 1])]))
    sampled = "" if stride == 1 else f"; one new position in {stride} looked at, so at least this"

    def of(table: Tensor) -> list[float | None]:
        rests = unrotated(table)
        turning = table[~rests].double()
        offset = table < offset_frequency_bound(trained_length)
        bounds = offset_angle_bound(table.double(), trained_length)[offset]
        closest = theory.separation(table, length)
        gaps, _ = theory.nearest_old(before, table, old_length=trained_length, new_positions=looked)
        slowest = float(turning.min()) if len(turning) else 0.0
        try:
            head = theory.sharpness_for(table, *theory.wendler_head(table), mass=MASS, length=length)
        except ValueError:  # nothing turns, or by less than float64 can tell
            head = None
        return [
            float(rests.sum()),
            float(wavelength(turning).min()) if len(turning) else None,
            2 * math.pi / slowest if slowest else None,
            length * slowest / (2 * math.pi),
            float(offset.sum()),
            float(bounds.mean()) if len(bounds) else None,
            granularity(table),
            closest.distance,
            float(closest.apart),
            float(gaps.max()),
            head,
            math.pi / 2 / slowest if slowest and not bool(rests.any()) else None,
        ]

    names = [
        ("Unrotated pairs", f"of {len(before)}", ""),
        ("Fastest wavelength", "tokens", ""),
        ("Slowest wavelength of a pair that turns", "tokens", ""),
        ("Turns of that pair within the length", "turns", "Barbero et al.; below 1 it never comes round"),
        ("Pairs under Jonasson's frequency bound", f"of {len(before)}", "no full turn within the trained length"),
        ("Their mean lower angle bound", "rad", "Jonasson eq. 16"),
        ("Mean sine of consecutive images", "", "Xiong et al. theorem 1, pairs of equal norm"),
        ("Closest two images within the length", "", "Xiong et al.'s q; unit vector, pairs of equal norm"),
        ("Their positions are apart by", "tokens", "1 is what Xiong et al. assume"),
        ("Farthest new image from its nearest old one", "", f"Xiong et al.'s d, changed; unit vector{sampled}"),
        (
            "Factor of a previous-token head",
            "",
            f"Wendler's alpha for {MASS} of attention at every position",
        ),
        (
            "Quarter turn of the slowest pair",
            "tokens",
            "Barbero et al. thm 6.1: content in it changes sign; none where a pair is unrotated",
        ),
    ]
    values = zip(names, of(before), of(after), strict=True)
    return tuple(Fact(name, unit, first, second, note) for (name, unit, note), first, second in values)


def numbers(entry: Entry) -> tuple[str, str, str]:
    """Return our number, the paper's and their difference in per cent, for people."""
    difference = "" if entry.difference is None else f"{100 * entry.difference:+z.1f} %".replace("-", "−")
    return text(entry.ours), "" if entry.printed is None else text(entry.printed), difference


def cells(fact: Fact) -> tuple[str, str]:
    """Return a fact's two numbers for people."""
    before, after = ("none" if value is None else text(value) for value in (fact.before, fact.after))
    return before, after


def text(value: float) -> str:
    """Return a number with four digits that count, whole from a thousand on.

    >>> text(0.0721), text(54410.3), text(2.0), text(-85.47)
    ('0.0721', '54,410', '2', '−85.47')
    """
    return (f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}").replace("-", "−")
