"""Look at the tables that a model in memory really uses."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rope_patch import frequencies
from rope_patch.methods import Method, TwoTables
from rope_patch.patching.base_tables import (
    Tables,
    call_rotary,
    config_with,
    encoding_of,
    original_rotary,
    read_tables,
    settings_of,
    where,
)
from rope_patch.patching.encoding import encode
from rope_patch.patching.locate import PatchError, RotaryLocation, device_of, find_rotary, holds_adapters_twice
from rope_patch.patching.module import PatchedRotary
from rope_patch.patching.record import PatchRecord, TableRecord, about_two_tables, key_of
from rope_patch.patching.two_tables import TwoTableRotary, reaching
from rope_patch.tables import RotaryTable

_FAR = 10**15
"""A length under the long table of any patch [tokens]."""


@dataclass(frozen=True, repr=False)
class Inspection:
    """What was found of a model's rotary tables; ``print`` shows all of it.

    Attributes:
        model_class: the class of the model.
        tables: the tables in use, one for each layer type.
        record: the patch record, None on a model that is not patched.
        warnings: what is unusual about the tables, a sentence each.
        checked: what was compared and found equal, a sentence each.
        cast_warning: what ``.bfloat16()`` and the like would do to the table of the loaded model; None where they do no
            harm. Loading it with ``dtype=`` does none, and neither do the commands.
    """

    model_class: str
    tables: tuple[RotaryTable, ...]
    record: PatchRecord | None
    warnings: tuple[str, ...]
    checked: tuple[str, ...] = ()
    cast_warning: str | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """The warnings, with the one about casting."""
        return self.warnings if self.cast_warning is None else (*self.warnings, self.cast_warning)

    @property
    def method(self) -> str | None:
        """The method string of the patch; None on a model that is not patched."""
        return None if self.record is None else str(self.record.to_method())

    def __repr__(self) -> str:
        state = "not patched" if self.method is None else f"patched with {_shortened(self.method)}"
        counts = [f"{len(self.tables)} table{'s' * (len(self.tables) != 1)}"]
        counts += [f"{len(self.warnings)} warning{'s' * (len(self.warnings) != 1)}"] * bool(self.warnings)
        return f"<Inspection of {self.model_class}: {', '.join([state, *counts])}>"

    def __str__(self) -> str:
        lines = [f"{self.model_class}: {'not patched' if self.method is None else f'patched, {self.method}'}"]
        for table in self.tables:
            wavelengths = frequencies.wavelength(table.inv_freq)
            rotated = wavelengths[torch.isfinite(wavelengths)]
            span = f"{rotated.min():.4g} to {rotated.max():.4g} tokens" if len(rotated) else "none rotates"
            partial = int((frequencies.turns(table.inv_freq, table.max_position_embeddings) < 1).sum())
            lines += [
                f"  {table}",
                f"    wavelengths {span}; {partial} of {table.pairs} pairs make no full turn within "
                f"{table.max_position_embeddings} tokens, {table.pairs - len(rotated)} of them unrotated",
            ]
        lines += [f"  {sentence}" for sentence in (*about_two_tables(self.record), *self.checked)]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def _shortened(method: str, most: int = 60) -> str:
    """Return a method string on a short line: one of a table names every number."""
    return method if len(method) <= most else f"{method[:most]}…"


def inspect_model(model: nn.Module) -> Inspection:
    """Return the rotary tables that a model uses, patched or not.

    Raises:
        TypeError: no model of transformers.
        ValueError: a model without a rotary table that could be patched.
    """
    location = find_rotary(model)
    record = location.record
    missing = [] if record is None or record.missing is None else [record.missing]
    if isinstance(location.module, PatchedRotary):
        in_use = tuple(location.module.tables.values())
        lost = ["patched, but its config has lost the record"] if record is None else []
        return Inspection(type(location.model).__name__, in_use, record, (*missing, *_scaling_warnings(in_use), *lost))
    # Read what the config in force describes, patched or not, without the record's base.
    by_layer_type, warnings = read_tables(_without_record(location), strict=False)
    if record is not None:
        records = {key_of(kind): TableRecord.of(table) for kind, table in by_layer_type.items()}
        warnings += _differences(record.tables, records, "record")
    in_use = tuple(by_layer_type.values())
    warnings = [*missing, *warnings, *_scaling_warnings(in_use)]
    cast_warning = _cast_warning(in_use, getattr(location.config, "dtype", None))
    return Inspection(type(location.model).__name__, in_use, record, tuple(warnings), cast_warning=cast_warning)


def trained_length(model: nn.Module) -> int:
    """Return the context that a model was trained at: what its config states, of a patched one before the patch.

    The context of a table that the checkpoint itself scales (Llama 3.1's) is the scaled one: it was trained with that.

    Raises:
        ValueError: a model without a rotary table.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=1, vocab_size=8)
        >>> trained_length(LlamaForCausalLM(config))
        2048
    """
    record = find_rotary(model).record
    stated = None if record is None else record.base_config.get("max_position_embeddings")
    return int(stated or inspect_model(model).tables[0].max_position_embeddings)


def _scaling_warnings(tables: Sequence[RotaryTable]) -> Iterator[str]:
    for table in tables:
        if table.attention_scaling != 1.0:
            yield (
                f"{where(table)} multiplies cos and sin of every pair by {table.attention_scaling:g}, unrotated pairs "
                f"included: logits by {table.attention_scaling**2:.3g}"
            )


def _cast_warning(tables: Sequence[RotaryTable], dtype: torch.dtype | None) -> str | None:
    """Say what casting would do to a table of the original module; a patched one does not change."""
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    rotated = torch.cat([table.inv_freq[~frequencies.unrotated(table.inv_freq)] for table in tables])
    if not len(rotated):
        return None
    error = float(((rotated.to(dtype).float() - rotated).abs() / rotated).max())
    return (
        f"weights are {dtype}: load them with dtype=; casting the model afterwards (.to, .half, .bfloat16) would "
        f"round its original table by up to {error:.2%}"
    )


def _without_record(location: RotaryLocation) -> RotaryLocation:
    config = copy.deepcopy(location.config)
    config.__dict__.pop("rope_patch", None)
    return replace(location, configs=(config,))


def verify_model(model: nn.Module, record: PatchRecord | None = None) -> PatchRecord:
    """Check that the model really uses the tables its record describes; raise with the difference if not.

    The method is applied again to the base table, the config is read as transformers alone would read it, and the
    rotary module is called and its cos and sin compared.

    Args:
        model: a patched model, in memory or loaded from a patched folder, with or without this package.
        record: what to check against, such as an adapter's; by default the model's own.

    Returns:
        The record.

    Raises:
        PatchError: no record, or any difference.
    """
    location = find_rotary(model)
    own = location.record
    expected = record or own
    if expected is None:
        raise PatchError(
            f"{type(location.model).__name__} carries no patch record: it is not patched, or the patch was lost"
        )
    expected.warn_of_missing()
    problems = []
    if holds_adapters_twice(model):
        problems.append("a PeftModel lies inside another, and the names in an adapter's file match nothing there")
    if own is None:
        problems.append("the model carries no patch record")
    else:
        base, redone, _ = _redone(location, own)
        problems += _differences(own.base_tables, {key_of(k): TableRecord.of(s) for k, s in base.items()}, "base table")
        problems += _differences(own.tables, {key_of(k): TableRecord.of(s) for k, s in redone.items()}, "method")
        length = own.target_length or int(own.base_config["max_position_embeddings"])
        module_class = type(location.module.original if isinstance(location.module, PatchedRotary) else location.module)
        rebuilt = original_rotary(module_class, config_with(location.config, settings_of(location.config)))
        problems += [f"config: {p}" for p in measure(rebuilt, own.tables, torch.device("cpu"))]
        if location.config.max_position_embeddings != length:
            problems.append(
                f"max_position_embeddings is {location.config.max_position_embeddings}, the record says {length}"
            )
    if not any(
        buffer.is_meta for buffer in location.module.buffers()
    ):  # without weights only the config can be checked
        problems += [f"in use: {p}" for p in _in_use(location, expected)]
    if problems:
        raise PatchError(
            f"{type(location.model).__name__} does not use the tables of {expected.to_method()}:\n  "
            + "\n  ".join(problems)
        )
    return expected


def _in_use(location: RotaryLocation, record: PatchRecord) -> list[str]:
    """Compare the tables that a model uses with those of a record; returns a line per difference."""
    module, device = location.module, device_of(location.model)
    problems = measure(module, record.tables, device)
    method = record.to_method()
    if not isinstance(method, TwoTables) or not isinstance(module, PatchedRotary):
        return problems  # the module of transformers has the long table alone
    if not isinstance(module, TwoTableRotary) or module.switch_at != method.switch_at:
        switches = f"at {module.switch_at} tokens" if isinstance(module, TwoTableRotary) else "nowhere"
        return [*problems, f"the table changes {switches}, the record says at {method.switch_at} tokens"]
    short = measure(module, record.short_tables, device, reach=method.switch_at)
    return problems + [f"short table: {problem}" for problem in short]


def method_of(location: RotaryLocation, record: PatchRecord) -> Method:
    """Return a record's method; where its class is missing and the config has its tables, with their encodings."""
    if record.missing is None or location.record is None or location.record.tables != record.tables:
        return record.to_method()
    return record.to_method({key_of(kind): encoding_of(location.config, kind) for kind in record.layer_types})


def _redone(location: RotaryLocation, record: PatchRecord) -> tuple[Tables, Tables, dict[str, Any]]:
    """Apply a record's method again: the base tables, the tables, and the config that says them."""
    base, _ = read_tables(location, freeze_at=record.freeze_at)
    method = method_of(location, record)
    again = {kind: method(table) if kind in record.layer_types else table for kind, table in base.items()}
    length = record.target_length or int(record.base_config["max_position_embeddings"])
    redone, settings = encode(location, base, again, length)
    return base, redone, settings


def edits_since(location: RotaryLocation) -> list[str]:
    """Return what somebody has changed in a patched model's config since the patch, a line for each key."""
    record = location.record
    if record is None:
        return []
    recorded, current = (
        dict(_flat(settings_of(config_with(location.config, settings))))
        for settings in (_redone(location, record)[2], settings_of(location.config))
    )
    return [
        f"{key} {recorded.get(key, 'absent')} -> {current.get(key, 'absent')}"
        for key in sorted({*recorded, *current})
        if recorded.get(key) != current.get(key)
    ]


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, list(value) if isinstance(value, tuple) else value


def _differences(recorded: Mapping[str, TableRecord], tables: Mapping[str, TableRecord], what: str) -> list[str]:
    if set(recorded) != set(tables):
        return [f"{what}: layer types are {sorted(tables)}, the record has {sorted(recorded)}"]
    return [
        f"{what} [{key}]: table {tables[key].hash}, the record says {recorded[key].hash}"
        for key in recorded
        if not recorded[key].matches(tables[key])
    ]


def measure(
    module: nn.Module, tables: Mapping[str, TableRecord], device: torch.device, *, reach: int = _FAR
) -> list[str]:
    """Call a rotary module and compare its cos and sin with the tables; returns a line per difference.

    Args:
        module: to be called.
        tables: by layer type.
        device: to call it on.
        reach: the length that is stated to a module of two tables [tokens].
    """
    positions = torch.tensor([[n for n in (0, 1, 2, 3, 17, 101, 1009, 4093) if n < reach]], device=device)
    problems = []
    for key, table in tables.items():
        kind = None if key == key_of(None) else key
        try:
            with reaching(module, reach):
                cos, sin = call_rotary(module, kind, positions)
        except Exception as error:
            problems.append(f"[{key}] cannot be called: {error}")
            continue
        f = frequencies.table_of(table.inv_freq)
        if cos.dtype != torch.float32 or cos.device.type != device.type:
            problems.append(f"[{key}] cos is {cos.dtype} on {cos.device}, expected torch.float32 on {device}")
        if cos.shape[-1] != len(f):
            problems.append(f"[{key}] has {cos.shape[-1]} pairs, the record has {len(f)}")
            continue
        angles = positions.cpu()[..., None].double() * f.double()  # on the CPU: not every device has doubles
        # float32 angles carry a relative error of 6e-8; a table off by 1e-5 shows at the far positions
        allowed = 2e-6 + 2e-7 * angles
        for name, got, want in (("cos", cos, angles.cos()), ("sin", sin, angles.sin())):
            off = (got.cpu().double() - want * table.attention_scaling).abs()
            if bool((off > allowed * table.attention_scaling).any()) or not bool(torch.isfinite(got).all()):
                pair = int((off - allowed * table.attention_scaling).flatten(0, 1).max(0).values.argmax())
                turns = math.atan2(float(sin[0, 1, pair]), float(cos[0, 1, pair]))
                problems.append(
                    f"[{key}] {name} is off by up to {float(off.max()):.3g}: pair {pair} turns {turns:.6g} rad/token, "
                    f"the record says {table.inv_freq[pair]:.6g}"
                )
                break
    return problems
