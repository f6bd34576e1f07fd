"""What a patch record must hold, where somebody may have edited the file that it is read from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rope_patch.methods import TwoTables

NEEDED = ("method", "layer_types", "tables", "base_tables", "base_config")
_TABLES = "tables with inv_freq, attention_scaling and hash"
_LENGTH = "a number of tokens or null"
_RULES = {
    "method": "an object with the method's name and parameters",
    "layer_types": "a list of layer types",
    "tables": _TABLES,
    "base_tables": _TABLES,
    "base_config": "an object with rope_parameters and max_position_embeddings",
    "target_length": _LENGTH,
    "precision": "float32 or float64",
    "freeze_at": _LENGTH,
    "short_tables": _TABLES,
    "edited": "a list of layer types",
    "package_version": "a version",
    "schema": "a number",
}
"""By key, what its value must be."""


def check_layout(data: Mapping[str, Any]) -> None:
    """Raise ValueError unless a record has the keys that it needs, each with a value of its kind, and they agree."""
    for key, rule in _RULES.items():
        if key not in data and key in NEEDED:
            raise ValueError(f"the rope_patch record lacks {key!r}, {rule}")
        if key in data and not _fits(key, data[key]):
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


def _fits(key: str, value: Any) -> bool:
    """Tell whether the value of a key follows its rule."""
    match key, value:
        case ("method", {}) | ("package_version", str()) | ("precision", "float32" | "float64"):
            return True
        case "layer_types", [_, *_]:
            return all(item is None or isinstance(item, str) for item in value)
        case "edited", [*_]:
            return all(isinstance(item, str) for item in value)
        case (("tables" | "base_tables" | "short_tables"), {}):
            return (key == "short_tables" or len(value) > 0) and all(map(_is_table, value.values()))
        case "base_config", {"rope_parameters": {}, "max_position_embeddings": length}:
            return _is_length(length)
        case (("target_length" | "freeze_at"), None):
            return True
        case (("target_length" | "freeze_at" | "schema"), length):
            return _is_length(length)
    return False


def _is_table(value: Any) -> bool:
    match value:
        case {"inv_freq": [_, *_] as numbers, "attention_scaling": scaling, "hash": str()}:
            return all(map(_is_number, (*numbers, scaling)))
    return False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
