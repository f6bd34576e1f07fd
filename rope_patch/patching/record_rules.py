"""What a patch record must hold, where somebody may have edited the file that it is read from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from rope_patch.methods import TwoTables


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _is_table(value: Any) -> bool:
    if not isinstance(value, Mapping) or not isinstance(numbers := value.get("inv_freq"), list | tuple) or not numbers:
        return False
    return all(map(_is_number, (*numbers, value.get("attention_scaling")))) and isinstance(value.get("hash"), str)


def _is_base_config(value: Any) -> bool:
    if not isinstance(value, Mapping) or not isinstance(value.get("rope_parameters"), Mapping):
        return False
    return _is_length(value.get("max_position_embeddings"))


def _are_tables(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_table, value.values()))


def _are_types(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(item is None or isinstance(item, str) for item in value)


_NEEDED = ("method", "layer_types", "tables", "base_tables", "base_config")
_TABLES = "tables with inv_freq, attention_scaling and hash"
_LENGTH = "a number of tokens or null"
_RULES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "method": ("an object with the method's name and parameters", lambda value: isinstance(value, Mapping)),
    "layer_types": ("a list of layer types", lambda value: _are_types(value) and len(value) > 0),
    "tables": (_TABLES, lambda value: _are_tables(value) and len(value) > 0),
    "base_tables": (_TABLES, lambda value: _are_tables(value) and len(value) > 0),
    "base_config": ("an object with rope_parameters and max_position_embeddings", _is_base_config),
    "target_length": (_LENGTH, lambda value: value is None or _is_length(value)),
    "precision": ("float32 or float64", lambda value: value in ("float32", "float64")),
    "freeze_at": (_LENGTH, lambda value: value is None or _is_length(value)),
    "short_tables": (_TABLES, _are_tables),
    "edited": ("a list of layer types", lambda value: _are_types(value) and None not in value),
    "package_version": ("a version", lambda value: isinstance(value, str)),
    "schema": ("a number", _is_length),
}
"""By key: what a value must be, and whether one is."""


def check_layout(data: Mapping[str, Any]) -> None:
    """Raise ValueError unless a record has the keys that it needs, each with a value of its kind, and they agree."""
    for key, (rule, holds) in _RULES.items():
        if key not in data and key in _NEEDED:
            raise ValueError(f"the rope_patch record lacks {key!r}, {rule}")
        if key in data and not holds(data[key]):
            text = json.dumps(data[key], default=str)
            raise ValueError(
                f"the rope_patch record is malformed: {key!r} must be {rule}, got "
                f"{text if len(text) <= 80 else text[:80] + ' …'}. Restore the file from its source"
            )
    kinds = {kind or "all" for kind in data["layer_types"]}
    short, two = data.get("short_tables", {}).keys(), data["method"].get("method") == TwoTables.name
    fitting = data["tables"].keys() == data["base_tables"].keys() >= kinds and short == (kinds if two else set())
    if not fitting:
        raise ValueError(
            f"the rope_patch record was altered: its patched layer types {sorted(kinds)}, its tables "
            f"{sorted(data['tables'])} and the tables before the patch {sorted(data['base_tables'])} do not fit"
        )
