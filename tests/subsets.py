"""Which cases of a test run in ``make test``, and which are left to ``make test-full``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def full(*values: Any, id: str | None = None) -> Any:
    """One case that is left to ``make test-full``."""
    return pytest.param(*values, marks=pytest.mark.full, id=id)


def covering(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by every combination of values, of which ``make test`` runs a part that has each value.

    That part is the diagonal: its n-th case has the n-th value of each axis, and shorter axes begin again. For tests in
    which the axes are known to meet in no code of ours; where they do, parametrize by the product.
    """
    longest = max(map(len, axes.values()))
    chosen = {tuple(n % len(values) for values in axes.values()) for n in range(longest)}
    cases = []
    for places in itertools.product(*(range(len(values)) for values in axes.values())):
        values = [axis[place] for axis, place in zip(axes.values(), places, strict=True)]
        cases.append(pytest.param(*values) if places in chosen else full(*values))
    return pytest.mark.parametrize(tuple(axes), cases)


examples = pytest.mark.parametrize("examples", [4, full(40)])
"""How many random examples a slow property test draws in either."""
