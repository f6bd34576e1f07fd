"""The form in which a config states its rotary tables and windows: the keys that it has, whatever their numbers are.

How a program reads a config depends on its keys, and on few of their values. So what a program was seen to do with one
config of a family, it is taken to do with every config of that family in the same form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rope_patch.engines.program_contexts import kind_of
from rope_patch.engines.stated_config import StatedConfig
from rope_patch.methods.yarn import yarn_scaling

SHARE = "partial_rotary_factor"
_SCALARS = (
    "rope_theta",
    "rope_local_base_freq",
    SHARE,
    "original_max_position_embeddings",
    "rotary_emb_base",
    "rotary_pct",
    "global_rope_theta",
    "local_rope_theta",
)
_AS_USUAL = " as usual"
_BASE_AS_USUAL = " over the usual base"
_USUAL = {"beta_fast": 32, "beta_slow": 1, "truncate": True, SHARE: 1.0}
"""Keys of a table with the values that hold where they are left out."""


def without_tables(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json without the keys that state its tables."""
    return {key: value for key, value in written.items() if key not in ("rope_parameters", "rope_scaling", *_SCALARS)}


@dataclass(frozen=True)
class Form:
    """The form of a config.

    Attributes:
        tables: the keys that state its tables; those that have the values of the family's own defaults are "as usual",
            since a program may take them without reading them; so is an original context that is the whole one.
        layers: which layers have a window, where it is not the family's usual choice; empty where it is.
    """

    tables: str
    layers: str = ""

    @property
    def more_general(self) -> tuple[str, ...]:
        """The same keys, whatever the values of the bases are, and whatever all values are."""
        any_base = self.tables.replace(f"rope_theta{_AS_USUAL}", "rope_theta").replace(_BASE_AS_USUAL, "")
        return any_base, any_base.replace(_AS_USUAL, "")

    def __str__(self) -> str:
        return ", ".join(part for part in (self.tables, self.layers) if part)


def form_of(stated: StatedConfig) -> Form:
    """Return the form of a config.

    Args:
        stated: the config, as it is written and as transformers completes it.
    """
    parts = []
    for name in ("rope_parameters", "rope_scaling"):
        if written := stated.raw.get(name):
            parts.append(f"{name} {_tables_form(written, stated)}")
    usual = {"rope_theta": stated.usual_base, "original_max_position_embeddings": stated.context}
    for name in _SCALARS:
        value = stated.raw.get(name)
        if isinstance(value, str):  # with which transformers 4 is made to fail
            name = f"{name} text"
        if value is not None:
            if value == usual.get(name):
                name += _AS_USUAL
            parts.append(name)
    layers = _layers_form(stated)
    if layers and stated.raw.get("sliding_window_pattern"):
        layers += ", sliding_window_pattern"
    return Form("; ".join(parts), layers)


def _tables_form(written: Mapping[str, Any], stated: StatedConfig) -> str:
    nested = {kind: value for kind, value in written.items() if isinstance(value, Mapping)}
    if not nested:
        return _table_form(written, None, stated)
    return ", ".join(f"{kind}: {_table_form(value, kind, stated)}" for kind, value in sorted(nested.items()))


def _table_form(written: Mapping[str, Any], layer_type: str | None, stated: StatedConfig) -> str:
    kind = kind_of(written)
    if dict(written) == stated.usual_parameters(layer_type):
        return kind + _AS_USUAL
    keys = keys_with_effect(written)
    base = written.get("rope_theta")
    ending = (
        _BASE_AS_USUAL if base is not None and base == stated.usual_parameters(layer_type).get("rope_theta") else ""
    )
    if kind == "linear" and isinstance(written.get("factor"), int):
        keys[keys.index("factor")] = "whole factor"
    if keys:
        kind += f" ({', '.join(keys)})"
    return kind + ending


def keys_with_effect(written: Mapping[str, Any]) -> list[str]:
    """Return the keys of a table beside its type and its base, without those that state what holds without them."""
    usual = dict(_USUAL)
    if kind_of(written) == "yarn" and "factor" in written:
        mscales = (written.get("mscale"), written.get("mscale_all_dim"))
        usual["attention_factor"] = yarn_scaling(written["factor"], *mscales)
    elif kind_of(written) == "longrope" and written.get("factor", 1.0) == 1.0:
        usual["attention_factor"] = 1.0
    return [
        key
        for key, value in sorted(written.items())
        if key not in ("rope_type", "rope_theta") and value is not None and value != usual.get(key)
    ]


def _layers_form(stated: StatedConfig) -> str:
    window = stated.complete.get("sliding_window")
    kinds = stated.complete.get("layer_types")
    acts = window is not None and 0 < window < stated.context
    if kinds is None:
        return "a window in all layers" if acts else ""
    if not acts and len(stated.tables) == 1:
        return ""
    if [*kinds] == [*stated.usual_layer_types]:
        return ""
    if len(set(kinds)) == 1:
        return f"all layers {kinds[0]}"
    return "other layers"
