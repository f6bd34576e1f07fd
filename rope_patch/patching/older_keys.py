"""The keys of a config.json by which transformers 4, and engines that follow it, read the rotary tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rope_patch.runtime.errors import read_json
from rope_patch.runtime.folders import write_atomically

_SHARE = "partial_rotary_factor"
OLDER_FAIL = "this table needs transformers 5"
"""A value of the base on which transformers 4 fails, for tables that it would otherwise lose in silence."""

ROPE_TYPES = ("default", *ROPE_INIT_FUNCTIONS)
"""The rope types that transformers knows. Other names of a ``type``, such as su, mean one that ``rope_type`` names."""

_OLDER_BASES = {
    **dict.fromkeys(("gemma3_text", "gemma3n_text"), ("rope_theta", "rope_local_base_freq")),
    **dict.fromkeys(("modernbert", "modernbert-decoder"), ("global_rope_theta", "local_rope_theta")),
}
"""The keys in which version 4 has the bases of full and of sliding attention, for families that have both there."""


def older_keys(model_type: str, parameters: Mapping[str, Any], layer_types: Sequence[str] = ()) -> dict[str, Any]:
    """Return the keys at the top of config.json that tell transformers 4, and engines that follow it, the same tables.

    They repeat ``rope_parameters``, since transformers 5 reads ``rope_scaling`` instead if both are there. If version 4
    has one scaling for all layer types, it is that of full attention. Some tables cannot be expressed: those of sliding
    layers that are not plain, and of families that came later. For these the base is a value on which version 4 fails,
    because without a base it would take its default. Olmo 3 has the form in which it is published, where its tables are
    of that form. What version 4 computes for every family that it knows is in
    ``benchmarks/results/older_loaders.json``.

    Args:
        model_type: the ``model_type`` of the config.
        parameters: the ``rope_parameters`` of the config.
        layer_types: the ``layer_types`` of the config. MLX reads ``sliding_window_pattern`` of Gemma 3 in their place.
    """
    if any(isinstance(value, Mapping) for value in parameters.values()):
        names = _OLDER_BASES.get(model_type)
        if names is None:
            full = parameters.get("full_attention")
            sliding = parameters.get("sliding_attention")
            # OLMo 3 as its authors publish it: one base, and one scaling, which full attention alone has.
            if (
                model_type == "olmo3"
                and full
                and sliding
                and sliding.get("rope_type", "default") == "default"
                and full["rope_theta"] == sliding["rope_theta"]
            ):
                return older_keys("", full)
            return {"rope_theta": OLDER_FAIL}
        keys = {}
        for kind, name in zip(("full_attention", "sliding_attention"), names, strict=True):
            if (table := parameters.get(kind)) is not None:
                scaled = table.get("rope_type", "default") != "default"
                keys[name] = OLDER_FAIL if scaled else table["rope_theta"]
        # Gemma 3 has one scaling in version 4, that of full attention; ModernBERT has none.
        if names == _OLDER_BASES["gemma3_text"] and "full_attention" in parameters:
            keys |= older_keys("", parameters["full_attention"])
            keys.pop(_SHARE, None)  # transformers 5 would give it to the sliding layers, too
        if model_type == "gemma3_text" and "full_attention" in layer_types:
            period = layer_types.index("full_attention") + 1
            if all((kind == "full_attention") == (i % period == 0) for i, kind in enumerate(layer_types, 1)):
                keys["sliding_window_pattern"] = period
        return keys
    base = "rope_theta"
    share = _SHARE
    if model_type in ("gpt_neox", "gpt_neox_japanese"):
        base = "rotary_emb_base"
        share = "rotary_pct"
    keys = {base: parameters["rope_theta"]}
    if _SHARE in parameters:
        keys[share] = parameters[_SHARE]
    if parameters.get("rope_type", "default") != "default" or set(parameters) - {"rope_type", "rope_theta", _SHARE}:
        keys["rope_scaling"] = dict(parameters)  # the sections of several position axes are read there, too
        if model_type == "nemotron":  # version 4 reads nothing but its base
            keys[base] = OLDER_FAIL
    return keys


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config.json that holds a patch record, or without one the part of the text decoder."""
    parts = [config]
    for part in parts:  # the list grows while it is read, so that nested configs are visited, too
        if "rope_patch" in part:
            return part
        parts += [value for value in part.values() if isinstance(value, dict)]
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def lost_base(text: Mapping[str, Any]) -> bool:
    """Tell whether the text part of a config.json states a scaling in ``rope_parameters``, and no base anywhere."""
    written = text.get("rope_parameters") or {}
    scaled = written.get("rope_type", "default") != "default"
    return scaled and not {"rope_theta", "rotary_emb_base"} & {*written, *text}


def add_older_keys(folder: str | Path, *, failing: bool = True) -> None:
    """Add the keys by which transformers 4 reads the tables to a checkpoint's config.json.

    A plain ``save_pretrained`` writes only what transformers 5 reads, and version 4 reads such a folder as unpatched.

    Args:
        folder: the folder of the checkpoint.
        failing: whether version 4 is to fail on a table that it cannot read; else it gets no keys for that.

    Raises:
        OSError: the folder cannot be written.
    """
    path = Path(folder) / "config.json"
    config = read_json(path)
    text = text_part(config)
    keys = older_keys(str(text.get("model_type")), text["rope_parameters"], text.get("layer_types") or ())
    text |= {key: value for key, value in keys.items() if failing or value != OLDER_FAIL}
    write_atomically(path, json.dumps(config, indent=2, sort_keys=True) + "\n")


def stated_twice(stated: Mapping[str, Any], used: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each rotary setting that a config.json states by two keys, with different values.

    Args:
        stated: the text part of the config.json, flattened.
        used: the ``rope_parameters`` that transformers makes of it, flattened.
    """
    sentences = []
    for name, value in stated.items():
        path = name.removeprefix("rope_parameters.").removeprefix("rope_scaling.")
        other = key = path.rpartition(".")[2]
        if path == name or key not in (path, "rope_type", "original_max_position_embeddings"):
            continue  # of layer types, each has values of its own
        if key == "rope_type":
            other = name.removesuffix(key) + "type"
            if stated.get(other) not in ROPE_TYPES:
                continue
        if stated.get(other) not in (None, value, OLDER_FAIL):
            sentences.append(
                f"{other} is {stated[other]!r} and {name} is {value!r}: transformers uses {used.get(path, value)!r}"
            )
    return sentences


def older_differences(config: Mapping[str, Any]) -> list[str]:
    """Return the differences between what a config.json tells transformers 4 and what it tells transformers 5."""
    text = text_part(dict(config))
    parameters = text.get("rope_parameters")
    if not isinstance(parameters, Mapping):
        return []
    # Transformers 5 reads a base at the top for tables that state none.
    base = {}
    if text.get("rope_theta") is not None:
        base["rope_theta"] = text["rope_theta"]
    nested = {kind: {**base, **table} for kind, table in parameters.items() if isinstance(table, Mapping)}
    complete: dict[str, Any] = nested or {**base, **parameters}
    if not all("rope_theta" in table for table in nested.values() or [complete]):
        return []
    expected = older_keys(str(text.get("model_type")), complete)
    stated = {key: text[key] for key in {*expected, "rope_scaling"} if text.get(key) is not None}
    if isinstance(stated.get("rope_scaling"), Mapping):
        stated["rope_scaling"] = {**base, **stated["rope_scaling"]}
    differences = []
    for key in sorted(stated):
        meant = expected.get(key)
        # Only a patch promises that transformers 4 fails on tables that it would lose.
        promised = meant != OLDER_FAIL or text.get("rope_patch") is not None
        if stated[key] != meant and promised:
            said = "no scaling" if meant is None else repr(meant)
            differences.append(f"{key} is {stated[key]!r}, rope_parameters says {said}")
    return differences
