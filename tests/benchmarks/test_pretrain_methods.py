"""Table 2 of Barbero et al. at a small size: its methods, and the intervals over seeds."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pretrain_methods import METHODS, changes
from rope_patch.methods import as_method


def run(method: str, seed: int, perplexity: float) -> dict[str, Any]:
    return {"method": method, "seed": seed, "heldout_perplexity": {"0-256": perplexity}}


def test_its_methods_are_methods_of_the_package() -> None:
    for method in METHODS:
        assert as_method(method)


def test_a_change_is_paired_by_seed_and_needs_two() -> None:
    runs = [run("default", seed, value) for seed, value in ((0, 20.0), (1, 40.0))]
    runs += [run("nope", 0, 22.0), run("nope", 1, 48.0), run("nope", 2, 1000.0), run("pi", 0, 30.0)]
    (change,) = changes(runs)
    # Student's quantile of one degree of freedom at 0.975 is tan(0.475 pi).
    logs = [math.log(1.1), math.log(1.2)]
    half = math.tan(0.475 * math.pi) * (logs[1] - logs[0]) / 2
    middle = sum(logs) / 2
    assert change["method"] == "nope" and change["seeds"] == 2
    assert change["0-256"] == pytest.approx(
        [100 * math.expm1(x) for x in (middle - half, middle, middle + half)], abs=0.06
    )
