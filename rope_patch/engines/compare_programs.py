"""Compare the tables that programs compute from a folder or GGUF file, for ``rope-patch doctor``."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rope_patch.checkpoints.model_without_weights import model_without_weights
from rope_patch.checkpoints.source_files import config_json, load_config, naming_checkpoint
from rope_patch.engines.dialect_tables import Built, relative_difference
from rope_patch.engines.stated_config import SLIDING, StatedConfig
from rope_patch.engines.tables_by_program import PROGRAMS, Reading, reading_of
from rope_patch.gguf.table import read_gguf
from rope_patch.patching.locate import PatchError, locate
from rope_patch.patching.verify import inspect_model, verify_model
from rope_patch.runtime.folders import is_gguf
from rope_patch.tables import RotaryTable

AGREES = "agrees"
DIFFERS = "differs"
REFUSES = "refuses"
UNVERIFIED = "unverified"
REFERENCE = "reference"
OURS = "transformers-5"
OTHER_KEYS = "it takes other keys of config.json, or other defaults, than transformers 5 does"
"""The reason of a difference that no rule explains."""


@dataclass(frozen=True, eq=False)
class ProgramReading:
    """The table that one program computes for the layers of one layer type.

    Attributes:
        program: the program, a key of ``PROGRAMS`` or ``OURS``.
        layer_type: the type of the layers; None if all layers share a table.
        verdict: the verdict: ``"agrees"``, ``"differs"``, ``"refuses"`` (the program fails) or ``"unverified"``;
            ``"reference"`` for transformers 5, and for llama.cpp on a GGUF file.
        built: the table that the program builds; None if it refuses or is unverified.
        difference: the largest difference of a frequency from the reference's, as a share of the larger of the two: 1
            if only one of them rotates a pair. None if the numbers of pairs differ, or there is no table.
        reasons: sentences on the reasons of the difference.
        fix: the command that may remove the difference, or another step; empty if nothing is to be done.
        moved: a sentence on layers that use another table or window than in transformers 5; empty if none does.
    """

    program: str
    layer_type: str | None
    verdict: str
    built: Built | None = None
    difference: float | None = None
    reasons: tuple[str, ...] = ()
    fix: str = ""
    moved: str = ""


@dataclass(frozen=True)
class ProgramComparison:
    """The tables that all programs compute from one checkpoint.

    Attributes:
        rows: the readings of the reference first, then those of each program.
        notes: sentences on what is unusual about the checkpoint.
    """

    rows: tuple[ProgramReading, ...]
    notes: tuple[str, ...]


def compare_programs(source: str | Path) -> ProgramComparison:
    """Compare the tables that programs compute from a checkpoint with those of transformers 5; no weights are loaded.

    Args:
        source: the folder, hub id or GGUF file that the programs read.

    Raises:
        OSError: there is nothing that can be read.
        ValueError: the source is an adapter, or the model's rotary table cannot be read.
    """
    if is_gguf(source):
        return _of_gguf(source)
    return _of_folder(source)


# --- folders ---------------------------------------------------------------------------------------------------------


def _of_folder(source: str | Path) -> ProgramComparison:
    model = model_without_weights(source, checked=False)
    inspection = inspect_model(model)
    location = locate(model)
    stated = StatedConfig.of(location.config, config_json(source), inspection.tables)
    rows = [_reference(OURS, table) for table in inspection.tables]
    for name in PROGRAMS:
        reading = reading_of(name, stated)
        fix = ""
        if not reading.unverified and not reading.agrees(stated):
            fix = _fix(source, name, model)
        rows += _rows(name, reading, stated, fix)
    unread = [f"transformers does not read {name}; an engine that does attends otherwise" for name in stated.unread]
    # Without the record: checks of their own say what differs from it.
    return ProgramComparison(tuple(rows), (*replace(location, record_data=None).warnings, *unread))


def _reference(program: str, table: RotaryTable) -> ProgramReading:
    return ProgramReading(program, table.layer_type, REFERENCE, _built(table), 0.0)


def _built(table: RotaryTable, *reasons: str) -> Built:
    return Built(table.inv_freq, table.attention_scaling, table.max_position_embeddings, reasons=reasons)


def _rows(program: str, reading: Reading, stated: StatedConfig, fix: str) -> list[ProgramReading]:
    for verdict, reason in ((UNVERIFIED, reading.unverified), (REFUSES, reading.refused)):
        if reason:
            return [ProgramReading(program, kind, verdict, reasons=(reason,), fix=fix) for kind in stated.tables]
    rows = []
    for kind, table in stated.tables.items():
        pairs = enumerate(zip(stated.layers, reading.layers, strict=True))
        moved = {i: (own, there) for i, (own, there) in pairs if own.kind == kind and own != there}
        if not moved:
            rows.append(_row(program, reading.tables[kind], table, fix))
            continue
        # The layers of one type are of two types in a program at most, of which one is the same.
        own, there = next(iter(moved.values()))
        row = _row(program, reading.tables[there.kind], table, fix)
        sentence = f"it runs layers {', '.join(map(str, moved))} as {there}, not as {own}"
        rows.append(replace(row, verdict=DIFFERS, moved=sentence, reasons=(reading.moved, *row.reasons), fix=fix))
    return rows


def _row(program: str, built: Built, table: RotaryTable, fix: str) -> ProgramReading:
    difference = relative_difference(built.inv_freq, table.inv_freq)
    if built.is_table(table):
        return ProgramReading(program, table.layer_type, AGREES, built, difference)
    reasons = built.reasons or (OTHER_KEYS,)
    if difference is None:
        pairs = f"it rotates {len(built.inv_freq)} pairs of features, and transformers 5 {table.pairs}"
        reasons = (pairs, *built.reasons)
    return ProgramReading(program, table.layer_type, DIFFERS, built, difference, reasons, fix)


_EXPORTS = {"transformers-4": "hf -o OUT", "mlx": "hf -o OUT", "llama.cpp": "gguf --converter PATH -o OUT.gguf"}
"""What ``export --to`` takes for a program if that is not its name."""


def _fix(source: str | Path, program: str, model: Any) -> str:
    """Return the command that writes what a program reads, as far as it can, and the one that says whether it did."""
    if locate(model).record is not None:
        try:
            verify_model(model)
        except PatchError:
            return "rope-patch doctor FOLDER --repair -o OUT: the config is not what the patch record describes"
    to = _EXPORTS.get(program, f"{program} -o OUT")
    export = f"rope-patch export {shlex.quote(str(source))} --to {to}"
    return f"{export}, which says so if it cannot; then rope-patch doctor OUT --for {program}"


# --- GGUF files ------------------------------------------------------------------------------------------------------


def _of_gguf(source: str | Path) -> ProgramComparison:
    """Compare the table of a file, as llama.cpp reads it, with the one that transformers' own reader computes.

    llama.cpp is the reference, but for sliding layers: transformers computes the table that the model was trained with,
    and llama.cpp may scale it, too.
    """
    found = read_gguf(source)
    with naming_checkpoint(source), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(source))
    tables = inspect_model(model).tables
    rows = []
    for own in tables:
        if own.layer_type == SLIDING and len(found.tables) > 1:
            in_file = found.tables[1]
            rows += [_reference(OURS, own), _row("llama.cpp", _built(in_file, _SCALED_TOO), own, _SLIDING_FIX)]
        else:
            in_file = replace(found.tables[0], layer_type=own.layer_type)
            fix = f"rope_patch.load({str(source)!r})"
            rows += [_reference("llama.cpp", in_file), _row(OURS, _built(own, _BASE_ALONE), in_file, fix)]
    for name in PROGRAMS:
        if name != "llama.cpp":
            reason = "what it reads of a GGUF file was not compared"
            rows += [ProgramReading(name, own.layer_type, UNVERIFIED, reasons=(reason,)) for own in tables]
    return ProgramComparison(tuple(rows), found.warnings)


_BASE_ALONE = (
    "its own reader (gguf_file=) takes the base and the context of a GGUF file, and no factors, scaling or record"
)
_SCALED_TOO = "llama.cpp has one factor on cos and sin for all layers, so that the sliding ones are scaled, too"
_SLIDING_FIX = "none in this file: give the model a method without a factor on cos and sin, such as pi or abf"
