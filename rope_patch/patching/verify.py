"""Inspect, measure and verify the tables that a model in memory really uses."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers.utils.generic import flatten_dict

from rope_patch import frequencies
from rope_patch.methods.already_scaled import context_reached
from rope_patch.patching.config_settings import config_with, settings_of
from rope_patch.patching.encode import plan_from_record
from rope_patch.patching.locate import Location, PatchError, device_of, holds_adapters_twice, locate
from rope_patch.patching.record import PatchRecord, TableRecord, differences, key_of, records_of
from rope_patch.patching.rotary import RotaryLayout, call
from rope_patch.tables import RotaryTable


@dataclass(frozen=True, repr=False)
class Inspection:
    """A description of a model's rotary tables; ``print`` shows all of it.

    Attributes:
        model_class: name of the model's class.
        tables: the tables in use, one for each layer type.
        record: the patch record; None on a model that is not patched.
        warnings: sentences on what is unusual about the tables.
    """

    model_class: str
    tables: tuple[RotaryTable, ...]
    record: PatchRecord | None
    warnings: tuple[str, ...]

    @property
    def method(self) -> str | None:
        """The method string of the patch; None on a model that is not patched."""
        return None if self.record is None else str(self.record.to_method())

    def __repr__(self) -> str:
        state = "not patched" if self.method is None else f"patched with {shortened(self.method)}"
        return f"<Inspection of {self.model_class}: {state}, warnings: {len(self.warnings)}>"

    def __str__(self) -> str:
        state = "not patched"
        if self.method is not None:
            state = f"patched, {self.method}"
        lines = [f"{self.model_class}: {state}"]
        for table in self.tables:
            wavelengths = frequencies.wavelength(table.inv_freq)
            rotated = wavelengths[torch.isfinite(wavelengths)]
            span = "none rotates"
            if len(rotated):
                span = f"{rotated.min():.4g} to {rotated.max():.4g} tokens"
            lines += [f"  {table}", f"    wavelengths {span}; {turns_in_context(table)}"]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.warnings)])


def turns_in_context(table: RotaryTable) -> str:
    """Return a line with the context of a table, and the number of its pairs that make no full turn within it."""
    context = context_reached(table)
    partial = int((frequencies.turns(table.inv_freq, context) < 1).sum())
    reached = f"context {context}"
    if context != table.max_position_embeddings:
        reached += f", {table.max_position_embeddings} stated"
    return f"{reached}; {partial} pairs make no full turn within it"


def shortened(method: str) -> str:
    """Return a method string cut to a short line, since the method string of a table names every number.

    >>> shortened("yarn:factor=2")
    'yarn:factor=2'
    """
    return method if len(method) <= 60 else f"{method[:60]}…"


def inspect_model(model: nn.Module) -> Inspection:
    """Return the rotary tables that a model uses, patched or not.

    Raises:
        TypeError: it is not a model of transformers.
        ValueError: the model has no rotary table that could be patched.
    """
    location = locate(model)
    record = location.record
    if location.patched is not None:
        lost = () if record is not None else ("patched, but its config has lost the record",)
        return Inspection(location.name, tuple(location.patched.tables.values()), record, lost)
    # Without the record the location describes what the config in force states: the patch, if there is one.
    as_stated = replace(location, record_data=None)
    in_use = tuple(as_stated.tables.values())
    warnings = [*as_stated.warnings]
    warnings += [
        f"{table.name} changes with the length during generation: pass freeze_at to patch it"
        for table in in_use
        if table.is_dynamic
    ]
    if record is not None:
        warnings += differences(record.tables, records_of(as_stated.tables), "record")
    return Inspection(location.name, in_use, record, tuple(warnings))


def trained_length(model: nn.Module) -> int:
    """Return the context that a model was trained at, as its config states it, or stated it before the patch.

    A factor that reaches further than the stated context, as that of a card's YaRN, counts.

    If the checkpoint itself scales its table (Llama 3.1), its context is the scaled one, with which it was trained.

    Raises:
        ValueError: the model has no rotary table.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=1, vocab_size=8)
        >>> trained_length(LlamaForCausalLM(config))
        2048
    """
    return context_reached(next(iter(locate(model).tables.values())))


def verify_model(model: nn.Module) -> PatchRecord:
    """Check that a model really uses the tables that its record describes, and raise with the differences if not.

    The method is applied again to the base table, the config is read as transformers alone would read it, and the
    rotary module is called and its cos and sin compared.

    Args:
        model: a patched model, in memory or loaded from a patched folder, with or without this package.

    Returns:
        The record.

    Raises:
        PatchError: there is no record, or any difference.
    """
    location = locate(model)
    record = location.record
    if record is None:
        raise PatchError(f"{location.name} carries no patch record: it is not patched, or the patch was lost")
    problems = []
    if holds_adapters_twice(model):
        problems.append("a PeftModel lies inside another, and the names in an adapter's file match nothing there")
    # Three comparisons: the record against its method, the config against the record, the module against it.
    recomputed = plan_from_record(location, record).record
    problems += differences(record.base_tables, recomputed.base_tables, "base table")
    problems += differences(record.tables, recomputed.tables, "method")
    problems += differences(record.tables, records_of(location.stated_tables), "config")
    stated = location.config.max_position_embeddings
    if stated != record.stated_length:
        problems.append(f"max_position_embeddings is {stated}, the record says {record.stated_length}")
    if not location.without_numbers:
        for key, table in record.tables.items():
            measured = measure(location.module, location.layout, key, table, device_of(location.model))
            if measured.problem is not None:
                problems.append(f"in use: {measured.problem}")
    if problems:
        raise PatchError(
            f"{location.name} does not use the tables of {record.to_method()}:\n  " + "\n  ".join(problems)
        )
    return record


def edits_since(location: Location) -> list[str]:
    """Return the changes of a patched model's config since the patch, a sentence for each key."""
    if location.record is None:
        return []
    # The settings of the patch are computed again: the record holds those before it alone.
    patched = config_with(location.config, plan_from_record(location, location.record).settings)
    recorded = flatten_dict(settings_of(patched))
    current = flatten_dict(settings_of(location.config))
    return [
        f"{key.removeprefix('rope_parameters.')} is {current.get(key)}, the record says {recorded.get(key)}"
        for key in sorted({*recorded, *current})
        if recorded.get(key) != current.get(key)
    ]


# --- the table in use ------------------------------------------------------------------------------------------------

# Position 1 shows the frequencies themselves. The far positions multiply a small relative error until it can be seen.
_POSITIONS = (0, 1, 2, 3, 17, 101, 1009, 4093)


@dataclass(frozen=True, eq=False)
class Measured:
    """A measurement of the table that a rotary module uses.

    Attributes:
        key: the layer type of the table; ``"all"`` if all layers share one.
        expected: the table with which the module was compared.
        problem: a line on what differs; None if nothing does.
        inv_freq: (pairs,) float32, the frequencies in use, which are the angles at position 1 [rad/token]; None if the
            module cannot be called, or has another number of pairs.
        attention_scaling: the attention factor in use; None if ``inv_freq`` is.
        angle_error: the largest difference of an angle from the expected one [rad]; None if ``inv_freq`` is, or if an
            angle is not finite.
        position: the position of that angle [tokens]; None if ``angle_error`` is.
    """

    key: str
    expected: TableRecord
    problem: str | None
    inv_freq: Tensor | None = None
    attention_scaling: float | None = None
    angle_error: float | None = None
    position: int | None = None


def measure(
    module: nn.Module,
    layout: RotaryLayout,
    key: str,
    table: TableRecord,
    device: torch.device,
    *,
    context: int | None = None,
) -> Measured:
    """Call a rotary module, and compare its cos and sin with those of a table, computed in float64.

    Args:
        module: the rotary module, original or patched, in float32.
        layout: the layout in which it returns cos and sin.
        key: the layer type of the table; ``"all"`` if all layers share one.
        table: the table that the module should compute.
        device: the device of the positions, where the module keeps its table.
        context: the number of positions within which to stay, whose last position is compared, too [tokens].
    """
    compared = [*_POSITIONS]
    if context is not None:
        compared = [n for n in (*_POSITIONS, context - 1) if n < context]
    positions = torch.tensor([compared], device=device)
    kind = None if key == key_of(None) else key
    try:
        cos, sin = layout.pairs(call(module, kind, positions))
    except Exception as error:
        return Measured(key, table, f"[{key}] cannot be called: {error}")
    inv_freq = frequencies.table_of(table.inv_freq)
    if cos.shape[-1] != len(inv_freq):
        return Measured(key, table, f"[{key}] has {cos.shape[-1]} pairs, expected {len(inv_freq)}")
    # On the CPU, since not every device has doubles.
    got = torch.complex(cos.cpu().double(), sin.cpu().double())
    angles = positions.cpu()[..., None].double() * inv_freq.double()
    wanted = torch.polar(torch.full_like(angles, table.attention_scaling), angles)
    in_use = got[0, 1].angle().float()
    scaling = float(got[0, 1].abs().mean())
    if not bool(torch.isfinite(torch.view_as_real(got)).all()):
        return Measured(key, table, f"[{key}] cos and sin are not finite", in_use, scaling)
    # `off` compares cos and sin, which the attention factor changes, too; `turned` compares the angles alone.
    off = torch.view_as_real(got - wanted).abs().amax(-1)
    turned = (got * wanted.conj()).angle().abs()[0].amax(-1)
    # float32 angles carry a relative error of 6e-8; a table off by 1e-5 shows at the far positions.
    excess = off - (2e-6 + 2e-7 * angles) * table.attention_scaling
    problem: str | None = None
    if bool((excess > 0).any()):
        pair = int(excess[0].amax(0).argmax())
        turns = float(in_use[pair])
        what = f"pair {pair} turns {turns:.6g} rad/token, expected {table.inv_freq[pair]:.6g}"
        if math.isclose(turns, table.inv_freq[pair], rel_tol=1e-6):
            what = f"they are multiplied by {scaling:.6g}, expected {table.attention_scaling:.6g}"
        problem = f"[{key}] cos and sin are off by up to {float(off.max()):.3g}: {what}"
    worst = int(turned.argmax())
    return Measured(key, table, problem, in_use, scaling, float(turned[worst]), int(positions[0, worst]))
