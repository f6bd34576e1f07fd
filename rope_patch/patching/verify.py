"""Look at the tables a model really uses: inspect, verify."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rope_patch import frequencies
from rope_patch.patching.base_tables import (
    Tables,
    call_rotary,
    config_with,
    original_rotary,
    read_tables,
    settings_of,
    where,
)
from rope_patch.patching.encoding import encode
from rope_patch.patching.locate import PatchError, RotaryLocation, device_of, find_rotary, holds_adapters_twice
from rope_patch.patching.module import PatchedRotary
from rope_patch.patching.record import PatchRecord, TableRecord, key_of
from rope_patch.tables import RotaryTable


@dataclass(frozen=True)
class Inspection:
    """What :func:`inspect` found: the tables in use, the record if any, and remarks on what is odd."""

    model_class: str
    tables: tuple[RotaryTable, ...]
    record: PatchRecord | None
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.model_class}: {'not patched' if not self.record else f'patched, {self.record.to_method()}'}"]
        for slot in self.tables:
            length = frequencies.wavelength(slot.inv_freq)
            resting = int(frequencies.unrotated(slot.inv_freq).sum())
            never = int((frequencies.turns(slot.inv_freq, slot.max_position_embeddings) < 1).sum())
            turning = length[torch.isfinite(length)]
            span = f"{turning.min():.4g} to {turning.max():.4g} tokens" if len(turning) else "none turns"
            lines += [
                f"  {slot}",
                f"    wavelengths {span}; {never} of {slot.pairs} pairs make no full turn within "
                f"{slot.max_position_embeddings} tokens, {resting} of them still",
            ]
        return "\n".join([*lines, *(f"  note: {remark}" for remark in self.warnings)])


def inspect(model: nn.Module) -> Inspection:
    """Print the rotary tables a model uses, patched or not, and return them."""
    seen = inspect_model(model)
    print(seen)
    return seen


def inspect_model(model: nn.Module) -> Inspection:
    """Return what :func:`inspect` prints."""
    site = find_rotary(model)
    if isinstance(site.module, PatchedRotary):
        ours = tuple(site.module.tables.values())
        remarks = [*_scaling_remarks(ours), *(["patched, but its config has lost the record"] * (site.record is None))]
        return Inspection(type(site.model).__name__, ours, site.record, tuple(remarks))
    record = site.record
    # Read what the config in force describes, patched or not, without the record's base.
    slots, remarks = read_tables(_without_record(site), strict=False)
    if record is not None:
        remarks += _differences(record.tables, {key_of(k): TableRecord.of(s) for k, s in slots.items()}, "record")
    found = tuple(slots.values())
    remarks += [*_scaling_remarks(found), *_cast_remarks(found, getattr(site.config, "dtype", None))]
    return Inspection(type(site.model).__name__, found, record, tuple(remarks))


def _scaling_remarks(slots: Sequence[RotaryTable]) -> Iterator[str]:
    for slot in slots:
        if slot.attention_scaling != 1.0:
            yield (
                f"{where(slot)} multiplies cos and sin of every pair by {slot.attention_scaling:g}, still pairs "
                f"included: logits by {slot.attention_scaling**2:.3g}"
            )


def _cast_remarks(slots: Sequence[RotaryTable], dtype: torch.dtype | None) -> Iterator[str]:
    """What casting would do to a stock table; ours does not mind."""
    if dtype not in (torch.bfloat16, torch.float16):
        return
    turning = torch.cat([slot.inv_freq[~frequencies.unrotated(slot.inv_freq)] for slot in slots])
    if len(turning):
        error = float(((turning.to(dtype).float() - turning).abs() / turning).max())
        yield (
            f"weights are {dtype}: load them with dtype=; casting the model afterwards (.to, .half, .bfloat16) would "
            f"round its stock table by up to {error:.2%}"
        )


def _without_record(site: RotaryLocation) -> RotaryLocation:
    config = copy.deepcopy(site.config)
    config.__dict__.pop("rope_patch", None)
    return replace(site, configs=(config,))


def verify_model(model: nn.Module, record: PatchRecord | None = None) -> PatchRecord:
    """Check that the model really uses the tables its record describes; raise with the difference if not.

    The method is applied again to the base table, the config is read as a stock loader would, and the rotary module is
    called and its cos and sin compared.

    Args:
        model: a patched model, in memory or loaded from a patched folder, with or without this package.
        record: what to check against, such as an adapter's; by default the model's own.

    Returns:
        The record.

    Raises:
        PatchError: no record, or any difference.
    """
    site = find_rotary(model)
    own = site.record
    expected = record or own
    if expected is None:
        raise PatchError(
            f"{type(site.model).__name__} carries no patch record: it is not patched, or the patch was lost"
        )
    problems = []
    if holds_adapters_twice(model):
        problems.append("a PeftModel lies inside another, and the names in an adapter's file match nothing there")
    if own is None:
        problems.append("the model carries no patch record")
    else:
        base, redone, _ = _redone(site, own)
        problems += _differences(own.base_tables, {key_of(k): TableRecord.of(s) for k, s in base.items()}, "base table")
        problems += _differences(own.tables, {key_of(k): TableRecord.of(s) for k, s in redone.items()}, "method")
        length = own.target_length or int(own.base_config["max_position_embeddings"])
        module_class = type(site.module.original if isinstance(site.module, PatchedRotary) else site.module)
        said = original_rotary(module_class, config_with(site.config, settings_of(site.config)))
        problems += [f"config: {p}" for p in measure(said, own.tables, torch.device("cpu"))]
        if site.config.max_position_embeddings != length:
            problems.append(
                f"max_position_embeddings is {site.config.max_position_embeddings}, the record says {length}"
            )
    if not any(buffer.is_meta for buffer in site.module.buffers()):  # without weights only the config can be checked
        problems += [f"in use: {p}" for p in measure(site.module, expected.tables, device_of(site.model))]
    if problems:
        raise PatchError(
            f"{type(site.model).__name__} does not use the tables of {expected.to_method()}:\n  "
            + "\n  ".join(problems)
        )
    return expected


verify = verify_model


def _redone(site: RotaryLocation, record: PatchRecord) -> tuple[Tables, Tables, dict[str, Any]]:
    """Apply a record's method again: the base tables, the tables, and the config that says them."""
    base, _ = read_tables(site, freeze_at=record.freeze_at)
    again = {kind: record.to_method()(slot) if kind in record.layer_types else slot for kind, slot in base.items()}
    length = record.target_length or int(record.base_config["max_position_embeddings"])
    redone, settings = encode(site, base, again, length)
    return base, redone, settings


def edits_since(site: RotaryLocation) -> list[str]:
    """Return what somebody has changed in a patched model's config since the patch, a line for each key."""
    record = site.record
    if record is None:
        return []
    wanted, said = (
        dict(_flat(settings_of(config_with(site.config, settings))))
        for settings in (_redone(site, record)[2], settings_of(site.config))
    )
    return [
        f"{key} {wanted.get(key, 'absent')} -> {said.get(key, 'absent')}"
        for key in sorted({*wanted, *said})
        if wanted.get(key) != said.get(key)
    ]


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, list(value) if isinstance(value, tuple) else value


def _differences(wanted: Mapping[str, TableRecord], got: Mapping[str, TableRecord], what: str) -> list[str]:
    if set(wanted) != set(got):
        return [f"{what}: layer types are {sorted(got)}, the record has {sorted(wanted)}"]
    return [
        f"{what} [{key}]: table {got[key].hash}, the record says {wanted[key].hash}"
        for key in wanted
        if not wanted[key].matches(got[key])
    ]


def measure(module: nn.Module, tables: Mapping[str, TableRecord], device: torch.device) -> list[str]:
    """Call a rotary module and compare its cos and sin with the tables; returns a line per difference."""
    positions = torch.tensor([[0, 1, 2, 3, 17, 101, 1009, 4093]], device=device)
    problems = []
    for key, table in tables.items():
        kind = None if key == key_of(None) else key
        try:
            cos, sin = call_rotary(module, kind, positions)
        except Exception as error:
            problems.append(f"[{key}] cannot be called: {error}")
            continue
        f = frequencies.table_of(table.inv_freq)
        if cos.dtype != torch.float32 or cos.device.type != device.type:
            problems.append(f"[{key}] cos is {cos.dtype} on {cos.device}, expected torch.float32 on {device}")
        if cos.shape[-1] != 2 * len(f):
            problems.append(f"[{key}] has {cos.shape[-1] // 2} pairs, the record has {len(f)}")
            continue
        angles = positions.cpu()[..., None].double() * f.double()  # on the CPU: not every device has doubles
        # float32 angles carry a relative error of 6e-8; a table off by 1e-5 shows at the far positions
        allowed = 2e-6 + 2e-7 * angles
        for name, got, want in (("cos", cos, angles.cos()), ("sin", sin, angles.sin())):
            off = (got[..., : len(f)].cpu().double() - want * table.attention_scaling).abs()
            if bool((off > allowed * table.attention_scaling).any()) or not bool(torch.isfinite(got).all()):
                pair = int((off - allowed * table.attention_scaling).flatten(0, 1).max(0).values.argmax())
                turns = math.atan2(float(sin[0, 1, pair]), float(cos[0, 1, pair]))
                problems.append(
                    f"[{key}] {name} is off by up to {float(off.max()):.3g}: pair {pair} turns {turns:.6g} rad/token, "
                    f"the record says {table.inv_freq[pair]:.6g}"
                )
                break
    return problems
