"""Choose which cases of a test run in ``make test``, and which are left to ``make test-full``."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import pytest
import transformers
from packaging.version import Version


def full(*values: Any, id: str | None = None) -> Any:
    """A case of a parametrized test that is left to ``make test-full``."""
    return pytest.param(*values, marks=pytest.mark.full, id=id)


def covering(*, without: Collection[tuple[Any, ...]] = (), **axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by every combination of values, of which ``make test`` runs a part with every value in it.

    That part is the diagonal: its n-th case has the n-th value of each axis, and shorter axes begin again.

    Args:
        without: combinations that do not go together.
        **axes: the values of each argument of the test, by its name.
    """
    longest = max(map(len, axes.values()))
    chosen = {tuple(values[n % len(values)] for values in axes.values()) for n in range(longest)}
    cases = []
    for values in itertools.product(*axes.values()):
        name = "-".join(map(_name, values))
        if values not in without:
            cases.append(pytest.param(*values, id=name) if values in chosen else full(*values, id=name))
    return pytest.mark.parametrize(tuple(axes), cases)


def _name(value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(map(_name, value))
    return getattr(value, "__name__", str(value))


byte_level_llama = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="it reads a byte-level tokenizer.json that names LlamaTokenizer in another way",
)

examples = pytest.mark.parametrize("examples", [4, full(40)])
"""Number of random examples of a slow property test: 4 in ``make test``, 40 in ``make test-full``."""
