"""The papers' numbers on rotary tables, computed again: what they print, what is right, and why the two differ.

>>> next(entry.ours for entry in papers() if entry.name.startswith("pair 119, query with the token's key"))
-85.47
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rope_patch import theory
from rope_patch.frequencies import (
    geometric,
    granularity,
    granularity_limit,
    ntk_theta,
    offset_angle_bound,
    offset_frequency_bound,
    turns,
)


class Entry(NamedTuple):
    """A number of a paper.

    Attributes:
        source: the paper, and the place in it where there is one to name.
        name: what it is, with its unit.
        ours: computed here.
        printed: in the paper; None where it prints none.
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


# Barbero et al. section E.1: a head of Gemma 7B that looks for content. The paper counts pairs from 1 and calls this
# one 119.
PAIR, QUERY, KEY, BOS = 118, (-4.1, 11.3), (11.2, -3.5), (-2.5, 1.3)


def in_pair(values: tuple[float, float], pair: int = PAIR, pairs: int = 128) -> Tensor:
    """Return a vector that is zero but for one pair, in Hugging Face's half-split layout.

    >>> in_pair((1.0, 2.0), pair=1, pairs=2).tolist()
    [0.0, 1.0, 0.0, 2.0]
    """
    x = torch.zeros(2 * pairs, dtype=torch.float64)
    x[pair], x[pairs + pair] = values
    return x


def papers() -> tuple[Entry, ...]:
    """Return the papers' numbers beside ours, with what each paper leaves out or gets wrong."""
    return (*_barbero(), *_xiong(), *_jonasson())


def _barbero() -> Iterator[Entry]:
    table = geometric(1e4, 256)
    step = float(table[PAIR])
    slowest = float(turns(torch.tensor([1e-4]), 128000))
    yield Entry("Barbero et al.", "turns of a pair of 1e-4 rad/token in 128000 tokens", slowest, 2.04)
    yield Entry(
        "Barbero et al.", "frequency of pair 119 of Gemma 7B [rad/token]", step, 2.05e-4, "the paper counts from 1"
    )
    yield Entry("Barbero et al.", "its angle after 8000 tokens [rad]", 8000 * step, 1.64)
    slow = float(geometric(5e5, 128)[40])
    yield Entry("Barbero et al.", "500000^(−40/64) [rad/token]", slow, 1e-4, "printed as 0.0001: 2.7 times too small")
    places = torch.tensor([0, 8000, -8000])
    for name, vector, printed in (("the token's key", KEY, -85.5), ("BOS", BOS, 24.9)):
        at_zero, ahead, mirrored = theory.activation(table, places, in_pair(QUERY), in_pair(vector)).tolist()
        curve = theory.activation_curve(table, 20000, in_pair(QUERY), in_pair(vector))
        first = int((curve * at_zero < 0).long().argmax())
        yield Entry("Barbero et al. §E.1", f"pair 119, query with {name}: activation", at_zero, printed)
        yield Entry(
            "Barbero et al. §E.1",
            f"the same with the key 8000 tokens before the query ({name})",
            ahead,
            None,
            f"Barbero et al. say that it holds within Gemma's context and is expected to break beyond: with the key "
            f"before the query it changes sign from {first} tokens on (turned the other way, {mirrored:.1f})".replace(
                "-", "−"
            ),
        )
    alike = theory.head_mass(torch.zeros(1), torch.ones(2), torch.ones(2), length=2)[1]
    less = "less as soon as there is another token, as in [bos, x, x]"
    yield Entry(
        "Barbero et al. prop. 5.2",
        "without rotation: most attention one of two equal tokens can get",
        float(alike),
        0.5,
        less,
    )


def _xiong() -> Iterator[Entry]:
    plain = geometric(1e4, 128)
    tables = {"RoPE": plain, "PI 1/4": plain / 4, "ABF 50": geometric(5e5, 128)}
    limits = [
        ("RoPE", granularity_limit(1e4), None, "C_d is printed as a bare sum; it is the mean that converges"),
        ("PI 1/4", granularity_limit(1e4, factor=4.0), 0.027, "printed is α / ln b, 0.4 % high before rounding"),
        (
            "ABF 50",
            granularity_limit(1e4, beta=50.0),
            0.076,
            "printed is 1 / (ln b + ln β), 5.7 % high before rounding",
        ),
    ]
    for name, limit, printed, note in limits:
        yield Entry("Xiong et al. thm 1", f"{name}: mean sine of consecutive images, d → ∞", limit, printed, note)
        yield Entry("Xiong et al. thm 1", f"{name}: the same, d = 128", granularity(tables[name]))
    yield Entry(
        "Xiong et al.", "ABF 50 slows pair 1 by, d = 128", float(plain[1] / tables["ABF 50"][1]), 1.06, "“only 6 %”"
    )
    for name, table in (tables | {"NTK 4": geometric(ntk_theta(1e4, 4.0, 128), 128)}).items():
        gap = theory.farthest_image(plain, table, old_length=512, new_length=2048)
        note = "d as printed, smallest over both positions, is 0 for every method" if name == "RoPE" else ""
        yield Entry("Xiong et al. d(f, f̂)", f"{name}: farthest new image, 512 → 2048 tokens", gap.distance, None, note)


def _jonasson() -> Iterator[Entry]:
    for name, dim, context, share, mean in (("Phi-1", 32, 2048, 0.31, 3.93), ("Llama-2-7B", 128, 4096, 0.28, 4.19)):
        table = geometric(1e4, dim)
        under = table < offset_frequency_bound(context)
        bounds = offset_angle_bound(table.double(), context)[under]
        yield Entry(
            "Jonasson eq. 15", f"{name}: share of pairs without a full turn", float(under.double().mean()), share
        )
        yield Entry("Jonasson eq. 16", f"{name}: mean lower angle bound [rad]", float(bounds.mean()), mean)
    angle = 2048 * float(geometric(1e4, 32)[10])
    yield Entry(
        "Jonasson", "Phi-1: L·f of pair 10 [rad]", angle, 6.38, "6.380 is its angle bound π + L·f/2; both exceed 2π"
    )
