"""Inspect and verify the tables that a model in memory really uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers.utils.generic import flatten_dict

from rope_patch import frequencies
from rope_patch.methods.scaled import context_reached
from rope_patch.patching.encode import plan_from_record
from rope_patch.patching.locate import Location, PatchError, device_of, holds_adapters_twice, locate
from rope_patch.patching.measured import measure
from rope_patch.patching.record import (
    PatchRecord,
    TableRecord,
    config_with,
    records_of,
    settings_of,
)
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


def shortened(method: str, most: int = 60) -> str:
    """Return a method string cut to a short line, since the method string of a table names every number.

    >>> shortened("yarn:factor=2"), shortened("table:values=0.99/0.51", 18)
    ('yarn:factor=2', 'table:values=0.99/…')
    """
    return method if len(method) <= most else f"{method[:most]}…"


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
        warnings += _differences(record.tables, records_of(as_stated.tables), "record")
    return Inspection(location.name, in_use, record, tuple(warnings))


def trained_length(model: nn.Module) -> int:
    """Return the context that a model was trained at, as its config states it, or stated it before the patch.

    A YaRN that reaches further than the stated context, as a card adds it, counts.

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


def verify_model(model: nn.Module, record: PatchRecord | None = None) -> PatchRecord:
    """Check that a model really uses the tables that its record describes, and raise with the differences if not.

    The method is applied again to the base table, the config is read as transformers alone would read it, and the
    rotary module is called and its cos and sin compared.

    Args:
        model: a patched model, in memory or loaded from a patched folder, with or without this package.
        record: the record that the tables are compared with, such as an adapter's; by default the model's own.

    Returns:
        The record.

    Raises:
        PatchError: there is no record, or any difference.
    """
    location = locate(model)
    own = location.record
    expected = record or own
    if expected is None:
        raise PatchError(f"{location.name} carries no patch record: it is not patched, or the patch was lost")
    problems = []
    if holds_adapters_twice(model):
        problems.append("a PeftModel lies inside another, and the names in an adapter's file match nothing there")
    if own is None:
        problems.append("the model carries no patch record")
    else:
        # Three comparisons: the record against its method, the config against the record, the module against it.
        recomputed = plan_from_record(location, own).record
        problems += _differences(own.base_tables, recomputed.base_tables, "base table")
        problems += _differences(own.tables, recomputed.tables, "method")
        problems += _differences(own.tables, records_of(location.stated_tables), "config")
        stated = location.config.max_position_embeddings
        if stated != own.stated_length:
            problems.append(f"max_position_embeddings is {stated}, the record says {own.stated_length}")
    if not location.without_numbers:
        measured = measure(location.module, location.layout, expected.tables, device_of(location.model))
        problems += [f"in use: {one.problem}" for one in measured if one.problem is not None]
    if problems:
        raise PatchError(
            f"{location.name} does not use the tables of {expected.to_method()}:\n  " + "\n  ".join(problems)
        )
    return expected


def edits_since(location: Location) -> list[str]:
    """Return the changes of a patched model's config since the patch, a sentence for each key."""
    if location.record is None:
        return []
    # The settings of the patch are computed again: the record holds those before it alone.
    patched = config_with(location.config, plan_from_record(location, location.record).settings)
    recorded, current = flatten_dict(settings_of(patched)), flatten_dict(settings_of(location.config))
    return [
        f"{key.removeprefix('rope_parameters.')} is {current.get(key)}, the record says {recorded.get(key)}"
        for key in sorted({*recorded, *current})
        if recorded.get(key) != current.get(key)
    ]


def _differences(recorded: Mapping[str, TableRecord], tables: Mapping[str, TableRecord], what: str) -> list[str]:
    if set(recorded) != set(tables):
        return [f"{what}: layer types are {sorted(tables)}, the record has {sorted(recorded)}"]
    return [
        f"{what} [{key}]: table {tables[key].hash}, the record says {recorded[key].hash}"
        for key in recorded
        if not recorded[key].matches(tables[key])
    ]
