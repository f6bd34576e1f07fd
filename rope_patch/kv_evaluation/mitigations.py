"""Changes of an unsafe scheme that may make it safe, one thing at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rope_patch.kv_cache.schemes import Scheme

FINER = {"int2": "int4", "int3": "int4", "int4": "int8"}
"""For each format of values, the next finer one."""


def mitigations(name: str) -> dict[str, Scheme]:
    """Return what may help a scheme that is unsafe, by a name of its own: each a change of one thing.

    Args:
        name: a preset, or a scheme written out.
    """
    scheme = Scheme.parse(name)
    key, value = scheme.key, scheme.value

    def with_keys(**changes: Any) -> Scheme:
        """Return the scheme with other keys; unchanged where they do not fit the rest."""
        try:
            return replace(scheme, key=replace(key, **changes))
        except ValueError:
            return scheme

    def with_values(**changes: Any) -> Scheme:
        return replace(scheme, value=replace(value, **changes)) if value.format in FINER else scheme

    finer = FINER.get(value.format, value.format)
    changed = {
        "pre": with_keys(pre=True),
        "hadamard": with_keys(hadamard=True),
        "centre": with_keys(centre="unrotated"),
        "centreall": with_keys(centre="all"),
        "pre.centreall": with_keys(pre=True, centre="all"),
        "keep8": with_keys(keep=8),
        "channel32": with_keys(axis="channel", group=32),
        "v.token32": with_values(axis="token", group=32),
        f"v.{finer}": with_values(format=finer),
        "sinks=4": replace(scheme, sinks=max(4, scheme.sinks)),
        "residual=128": replace(scheme, residual=max(128, scheme.residual)),
    }
    return {f"{name}+{change}": other for change, other in changed.items() if other != scheme}
