"""Encode tables in a config so that transformers rebuilds them, to the last bit; and in the keys of older loaders."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rope_patch import frequencies
from rope_patch.methods import longrope_parameters
from rope_patch.patching.base_tables import (
    READ_GLOBAL,
    Tables,
    base_of,
    config_with,
    encoding_of,
    is_dynamic,
    original_rotary,
    rope_type_of,
    scaling_of,
    settings_of,
)
from rope_patch.patching.locate import RotaryLocation, original_tables
from rope_patch.patching.readers import DecoderReaders
from rope_patch.runtime.folders import write_atomically
from rope_patch.tables import RotaryTable


def encode(location: RotaryLocation, before: Tables, after: Tables, length: int) -> tuple[Tables, dict[str, Any]]:
    """Find config settings from which the model's own rotary class rebuilds every table, to the last bit.

    The native encoding of each table is tried first, then the longrope form; what counts is what that class makes
    of the config after a round trip through JSON. Tables whose last bits no factor reaches are canonicalised.

    Args:
        location: where the model keeps its rotary module.
        before: the base tables, as :func:`~rope_patch.patching.base_tables.read_tables` read them.
        after: the new tables; those that are the very table of ``before`` keep their encoding.
        length: the context the config will state [tokens].

    Returns:
        The final tables, and the config keys to set.

    Raises:
        ValueError: no config of transformers gives the table.
    """
    module, config = base_of(location)
    settings = settings_of(config) | {"max_position_embeddings": length}
    extras: list[dict[str, Any]] = [{}]
    if getattr(config, "is_heterogeneous", False):
        extras.append({READ_GLOBAL: True})
    if settings.get("head_dim", 0) is None:  # Mixtral: transformers' own YaRN multiplies by it
        extras.append({"head_dim": config.hidden_size // config.num_attention_heads})
    readers = DecoderReaders(location, config)
    final: Tables = {}
    for kind, table in after.items():
        encoding = encoding_of(config, kind)
        dynamic = is_dynamic(encoding, rope_type_of(module, kind, encoding))
        if table is before[kind] and table.rope_parameters is not None and not dynamic:
            final[kind] = table
        else:
            stated = replace(table, max_position_embeddings=length)
            final[kind], settings = _encode_table(location, readers, stated, [settings | extra for extra in extras])
    return final, settings


def _encode_table(
    location: RotaryLocation, readers: DecoderReaders, table: RotaryTable, starts: Sequence[dict[str, Any]]
) -> tuple[RotaryTable, dict[str, Any]]:
    """Return a table as a config states it, and the settings that do: the first that the model's own code reads so.

    Args:
        location: where the model keeps its rotary module.
        readers: what else reads the config.
        table: the table.
        starts: the settings to state it in, in order.

    Raises:
        ValueError: no config of transformers gives the table, or not without changing what others read.
    """
    module, config = base_of(location)
    kind, name = table.layer_type, type(location.model).__name__
    reason = "the table it rebuilds is another"
    for settings, candidate in itertools.product(starts, _encodings(table, readers, encoding_of(config, kind))):
        parameters = dict(candidate.rope_parameters or {})
        if kind is not None:
            parameters = {**settings["rope_parameters"], kind: parameters}
        trial = settings | {"rope_parameters": parameters}
        try:
            trial_config = config_with(config, trial)
            rebuilt = original_rotary(type(module), trial_config)
        except Exception as error:  # a family refuses a type in its own way: Phi3 takes longrope only
            reason = f"{type(error).__name__}: {error}"
            continue
        if not _same_table(rebuilt, candidate):
            continue
        if (objection := readers.objection(trial_config)) is None:
            return candidate, trial
        reason = f"{objection}; a patch changes the table alone"
        if "mscale_all_dim" in (table.rope_parameters or {}):  # attention would apply a factor of it itself
            raise ValueError(
                f"attention of {name} takes its softmax scale from mscale_all_dim, too: {reason}. Leave out mscale and "
                "mscale_all_dim, or state attention_factor. Nothing was changed"
            )
    raise ValueError(
        f"{name} cannot express this table in a config that plain transformers reads; nothing was changed. The last "
        f"encoding failed with {reason}"
    )


def _encodings(table: RotaryTable, readers: DecoderReaders, found: Mapping[str, Any]) -> Iterator[RotaryTable]:
    """Yield the encodings of a table, each as it is and with what other readers of the config may need."""
    for candidate in _own_encodings(table):
        for parameters in readers.completed(candidate.rope_parameters or {}, found):
            yield replace(candidate, rope_parameters=parameters)


def _own_encodings(table: RotaryTable) -> Iterator[RotaryTable]:
    if table.rope_parameters is not None:
        yield table
        if table.other_keys:  # a partial factor the family ignores must not be read by the native type
            yield replace(
                table,
                rope_parameters={k: v for k, v in table.rope_parameters.items() if k not in table.other_keys},
            )
    factors = frequencies.longrope_factors(table.inv_freq, table.rope_theta)
    form = longrope_parameters(factors, table, attention_scaling=table.attention_scaling)
    inv_freq = frequencies.zero_unrotated(frequencies.longrope(table.rope_theta, factors))
    scaling = {"short_mscale": table.attention_scaling, "long_mscale": table.attention_scaling}
    for own in (table.other_keys, {}, scaling):  # which Phi-MoE asks for, also where it is 1
        yield replace(table, inv_freq=inv_freq, rope_type="longrope", rope_parameters={**own, **form})


def _same_table(rotary: nn.Module, table: RotaryTable) -> bool:
    built = original_tables(rotary)[table.layer_type]
    return (
        built.shape == table.inv_freq.shape
        and torch.equal(frequencies.zero_unrotated(built), table.inv_freq)
        and scaling_of(rotary, table.layer_type) == table.attention_scaling
    )


# --- config.json as transformers 4 reads it --------------------------------------------------------------------------

_SHARE = "partial_rotary_factor"
OLDER_FAIL = "this table needs transformers 5"
"""A base on which transformers 4 fails, for tables that it would lose."""

_OLDER_BASES = {
    **dict.fromkeys(("gemma3_text", "gemma3n_text"), ("rope_theta", "rope_local_base_freq")),
    **dict.fromkeys(("modernbert", "modernbert-decoder"), ("global_rope_theta", "local_rope_theta")),
}
"""The keys of version 4 for the bases of full and of sliding attention, in families that have both there."""


def older_keys(model_type: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys at the top of config.json by which transformers 4, and engines that follow it, say the same.

    They repeat ``rope_parameters``, since transformers 5 takes ``rope_scaling`` in its place where both are there.
    Where version 4 has one scaling for all layer types it is that of full attention. For tables that it cannot
    express, of sliding layers that are not plain and of families that came later, it is given a base that it fails on,
    instead of none; so do the releases of version 5 in which Olmo 3 has one table. What they make of
    every family that it knows is in ``benchmarks/results/older_loaders.json``.
    """
    if any(isinstance(value, Mapping) for value in parameters.values()):
        names = _OLDER_BASES.get(model_type)
        if names is None:
            return {"rope_theta": OLDER_FAIL}
        keys: dict[str, Any] = {}
        for kind, name in zip(("full_attention", "sliding_attention"), names, strict=True):
            if (table := parameters.get(kind)) is not None:
                scaled = table.get("rope_type", "default") != "default"
                keys[name] = OLDER_FAIL if scaled else table["rope_theta"]
        if names == _OLDER_BASES["gemma3_text"] and "full_attention" in parameters:  # which has one scaling
            keys |= older_keys("", parameters["full_attention"])
        return keys
    neox = model_type in ("gpt_neox", "gpt_neox_japanese")
    base, share = ("rotary_emb_base", "rotary_pct") if neox else ("rope_theta", _SHARE)
    keys = {base: parameters["rope_theta"]}
    if _SHARE in parameters:
        keys[share] = parameters[_SHARE]
    if parameters.get("rope_type", "default") != "default" or set(parameters) - {"rope_type", "rope_theta", _SHARE}:
        keys["rope_scaling"] = dict(parameters)  # the sections of several position axes are read there, too
        if model_type == "nemotron":  # version 4 reads nothing but its base
            keys[base] = OLDER_FAIL
    return keys


def one_base_keys(parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the keys of OLMo 3 as its authors publish it: one base, and one scaling, which full attention alone has.

    Transformers 4 and SGLang read these. None where tables of two layer types are not of that kind.
    """
    full, sliding = parameters.get("full_attention"), parameters.get("sliding_attention")
    if full is None or sliding is None or sliding.get("rope_type", "default") != "default":
        return None
    return older_keys("", full) if full["rope_theta"] == sliding["rope_theta"] else None


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config.json that holds a patch record; in others the one of the text decoder."""
    parts = [config]
    for part in parts:  # which grows on the way
        if "rope_patch" in part:
            return part
        parts += [value for value in part.values() if isinstance(value, dict)]
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def add_older_keys(folder: str | Path) -> None:
    """Add the keys by which transformers 4 reads the tables to a checkpoint's config.json.

    A plain ``save_pretrained`` writes what transformers 5 reads alone, and version 4 takes such a folder for unpatched.

    Raises:
        OSError: the folder cannot be written.
    """
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    text = text_part(config)
    text |= older_keys(str(text.get("model_type")), text["rope_parameters"])
    write_atomically(path, json.dumps(config, indent=2, sort_keys=True) + "\n")


def older_differences(config: Mapping[str, Any]) -> list[str]:
    """Return how what a config.json tells transformers 4 differs from what it tells transformers 5."""
    text = text_part(dict(config))
    parameters = text.get("rope_parameters")
    if not isinstance(parameters, Mapping):
        return []
    # Transformers 5 reads a base at the top for tables that state none.
    base = {} if text.get("rope_theta") is None else {"rope_theta": text["rope_theta"]}
    nested = any(isinstance(value, Mapping) for value in parameters.values())
    complete = {kind: {**base, **table} for kind, table in parameters.items()} if nested else {**base, **parameters}
    if not all("rope_theta" in table for table in (complete.values() if nested else [complete])):
        return []
    expected = older_keys(str(text.get("model_type")), complete)
    stated = {key: text[key] for key in {*expected, "rope_scaling"} if text.get(key) is not None}
    if text.get("model_type") == "olmo3" and stated == one_base_keys(complete):
        return []
    return [
        f"{key} is {stated[key]!r}, rope_parameters says {expected.get(key)!r}"
        for key in sorted(stated)
        if stated[key] != expected.get(key)
    ]
