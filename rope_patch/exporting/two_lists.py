"""A patch of two tables as transformers' ``longrope`` type with a short and a long list that differ.

For loaders that choose one list for all they serve. Those that choose again in the middle of a sequence read keys of
one table under the other: docs/two-tables.md says which do what.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from rope_patch import frequencies
from rope_patch.methods import TwoTables, longrope_parameters
from rope_patch.patching.base_tables import base_of, config_with, original_rotary, settings_of
from rope_patch.patching.locate import find_rotary
from rope_patch.patching.record import PatchRecord, key_of
from rope_patch.patching.verify import inspect_model, measure

NOTE = (
    "two lists: an engine that chooses in the middle of a sequence reads cached keys of the short table under the long "
    "one, as transformers does; see docs/two-tables.md"
)


def about_two_tables(record: PatchRecord | None) -> list[str]:
    """Return what to know of a patch with two tables where another program reads it; nothing of other patches."""
    method = None if record is None else record.to_method()
    if not isinstance(method, TwoTables):
        return []
    return [
        f"the method has two tables, one of them for texts of up to {method.switch_at} tokens; other programs use the "
        "long table for all texts"
    ]


def two_lists(model: nn.Module) -> dict[str, Any]:
    """Return the config keys that give both tables of a patched model as the short and the long list of ``longrope``.

    Raises:
        ValueError: a model of one table, tables with different factors on cos and sin, or a family that does not build
            the two tables from them.
    """
    location = find_rotary(model)
    record = location.record
    method = None if record is None else record.to_method()
    if record is None or not isinstance(method, TwoTables) or method.switch_at is None:
        raise ValueError("form 'two-lists' is for a patch with a short and a long table: METHOD@LENGTH")
    settings = copy.deepcopy(settings_of(location.config))
    tables = {table.layer_type: table for table in inspect_model(model).tables}
    for key, short in record.short_tables.items():
        long = next(table for kind, table in tables.items() if key_of(kind) == key)
        scaling = long.attention_scaling
        if short.attention_scaling != scaling:
            raise ValueError(
                f"two lists share one factor on cos and sin, and the short table has {short.attention_scaling:g}, the "
                f"long one {scaling:g}: give both the same, such as attention_factor=1 in {method.long}"
            )
        lists = {
            f"{name}_factor": frequencies.longrope_factors(inv_freq, long.rope_theta)
            for name, inv_freq in (("short", frequencies.table_of(short.inv_freq)), ("long", long.inv_freq))
        }
        form = longrope_parameters(lists["long_factor"], long, attention_scaling=scaling) | lists
        form |= {"original_max_position_embeddings": method.switch_at, "short_mscale": scaling, "long_mscale": scaling}
        form = {**long.other_keys, **form}
        kind = long.layer_type
        settings["rope_parameters"] = form if kind is None else {**settings["rope_parameters"], kind: form}
    if hasattr(location.config, "original_max_position_embeddings"):  # where Phi-3 reads it
        settings["original_max_position_embeddings"] = method.switch_at
    original, _ = base_of(location)
    rebuilt = original_rotary(type(original), config_with(location.config, settings))
    _check(rebuilt, record, method.switch_at, type(location.model).__name__)
    return settings


def _check(rebuilt: nn.Module, record: PatchRecord, switch_at: int, name: str) -> None:
    """Raise unless transformers computes the short table up to the switch, and the long one beyond."""
    device = torch.device("cpu")
    short = measure(rebuilt, record.short_tables, device, reach=switch_at)
    long = measure(rebuilt, record.tables, device, last=switch_at)
    if short or long:
        raise ValueError(
            f"{name} does not build these two tables from two lists of the type longrope: {'; '.join([*short, *long])}"
        )
