"""Encode rotary tables in a config.json so that transformers 5 and 4 and other engines read the same table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rope_patch import frequencies
from rope_patch.engines.forms import SHARE, keys_with_effect
from rope_patch.methods.longrope import longrope_form
from rope_patch.patching.config_settings import READ_GLOBAL, settings_of
from rope_patch.patching.encode import encode_table
from rope_patch.patching.locate import Location
from rope_patch.patching.record import TableRecord
from rope_patch.tables import RotaryTable

OLDER_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
"""The rope types that transformers 4 knows."""


def encoding_for(table: RotaryTable, model_type: str, *, everywhere: bool) -> RotaryTable:
    """Return a table with ``rope_parameters`` from which transformers 4 and 5, and perhaps engines, read it.

    The table's own encoding is returned if all of them build the table from it. Other tables are written in the
    longrope form. It must state a single context, or engines would switch between two tables, and its scaling as
    ``short_mscale`` and ``long_mscale``, or they would compute one of their own. ``proportional``, which transformers 4
    does not know, is left only on Gemma 4: it is that family's own type, and version 4 does not know the family.

    Args:
        table: the table that is encoded.
        model_type: the ``model_type`` of the config.
        everywhere: whether vLLM and SGLang must read the table, too.
    """
    encoded = dict(table.rope_parameters or {})
    if "rope_type" in encoded:
        encoded.pop("type", None)  # the older name of the key, which some programs obey if the two disagree
    kind = encoded.get("rope_type", "default") if table.rope_parameters else None
    if kind is not None and ((kind in OLDER_TYPES and not everywhere) or _is_read(kind, encoded, table, model_type)):
        return replace(table, rope_parameters=encoded)
    rebuilt, form = longrope_form(table)
    mscale = {"short_mscale": table.attention_scaling, "long_mscale": table.attention_scaling}
    parameters = {**table.other_keys, **form, **mscale}
    return replace(table, inv_freq=frequencies.zero_unrotated(rebuilt), rope_parameters=parameters)


def _is_read(kind: str, encoded: Mapping[str, Any], table: RotaryTable, model_type: str) -> bool:
    """Tell whether vLLM and SGLang build a table from its own encoding, over the whole context.

    Both multiply the context by the factor of ``linear`` and ``proportional``; SGLang ignores the attention factor of
    YaRN, and both have no more positions than its factor times the original context.
    """
    keys = keys_with_effect(encoded)
    if kind in ("default", "llama3"):
        return "factor" not in keys or kind == "llama3"
    if kind == "yarn":
        original = encoded.get("original_max_position_embeddings") or table.max_position_embeddings
        return "attention_factor" not in keys and encoded["factor"] * original >= table.max_position_embeddings
    return kind == "proportional" and model_type == "gemma4_text" and encoded.get("factor", 1.0) == 1.0


def config_keys(location: Location, tables: Sequence[RotaryTable], *, everywhere: bool) -> dict[str, Any]:
    """Return the config keys that encode all tables of a model, checked against its original rotary class.

    Args:
        location: the place where the model keeps its tables, from :func:`~rope_patch.patching.locate.locate`.
        tables: the tables to encode.
        everywhere: whether to encode them for other engines too, as :func:`encoding_for` does.

    Raises:
        ValueError: the class does not build the tables from the keys.
    """
    settings = settings_of(location.config)
    for table in tables:
        encoded = encoding_for(table, str(location.config.model_type), everywhere=everywhere)
        parameters = _without_ignored_factor(location, table, dict(encoded.rope_parameters or {}))
        starts = [settings]
        if getattr(location.config, "is_heterogeneous", False):
            starts.append(settings | {READ_GLOBAL: True})
        _, settings = encode_table(location, [replace(encoded, rope_parameters=parameters)], starts)
    return settings


def _without_ignored_factor(location: Location, table: RotaryTable, encoded: dict[str, Any]) -> dict[str, Any]:
    """Return an encoding without a ``partial_rotary_factor`` that transformers ignores on a family, as on Llama.

    vLLM would obey it.
    """
    factor = encoded.get(SHARE)
    if factor is None or table.layer_type is not None or encoded.get("rope_type") == "proportional":
        return encoded
    head_dim = (
        getattr(location.config, "head_dim", None) or location.config.hidden_size // location.config.num_attention_heads
    )
    if int(head_dim * factor) == table.rotary_dim:
        return encoded
    return {key: value for key, value in encoded.items() if key != SHARE}


def equal(one: RotaryTable, other: RotaryTable) -> bool:
    """Tell whether two tables have the same numbers, up to the last bits of float32."""
    # 3e-7 is a few units in the last place: longrope factors cannot give every frequency exactly.
    return TableRecord.of(one).matches(TableRecord.of(other), rtol=3e-7)


def with_context(tables: Sequence[RotaryTable], length: int) -> tuple[RotaryTable, ...]:
    """Return the tables as they are in a config that states a context of ``length`` tokens."""
    return tuple(replace(table, max_position_embeddings=length) for table in tables)
