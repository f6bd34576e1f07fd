"""Families of tables that are compared without a gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rope_patch.words import did_you_mean

_PARTS = [f"p_rope:p={p}" for p in (1, 0.9, 0.75, 0.6, 0.5, 0.4, 0.25)]
FAMILIES: Mapping[str, Sequence[str]] = {
    "p_rope": [*_PARTS, *(f"abf:factor={base}+{part}" for base in (10, 50) for part in _PARTS)]
}
"""The families of :func:`family`: values of p of p-RoPE, with 1, 10 and 50 times the base."""


def family(name: str) -> list[str]:
    """Return the members of a family that are worth comparing, to be given as ``init`` with ``Schedule(steps=0)``.

    Raises:
        ValueError: an unknown family.

    Example:
        >>> family("p_rope")[:3]
        ['p_rope:p=1', 'p_rope:p=0.9', 'p_rope:p=0.75']
    """
    if name not in FAMILIES:
        raise ValueError(f"unknown family {name!r}.{did_you_mean(name, FAMILIES)} Known: {', '.join(FAMILIES)}")
    return list(FAMILIES[name])
