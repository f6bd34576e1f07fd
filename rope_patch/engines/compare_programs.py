"""Compare the tables that programs compute from a folder or GGUF file, for ``rope-patch doctor``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rope_patch import frequencies
from rope_patch.checkpoints.model_without_weights import model_without_weights
from rope_patch.checkpoints.source_files import config_json, load_config, naming_checkpoint
from rope_patch.engines.asking import AskedLayer, ask, ask_files
from rope_patch.engines.programs import PROGRAMS, UNVERIFIED
from rope_patch.engines.readings import Reading, changing, reading_asked, reading_of, to_ask
from rope_patch.engines.stated_config import SLIDING, StatedConfig
from rope_patch.engines.verdicts import SAME, SENTENCES
from rope_patch.gguf.table import read_gguf
from rope_patch.patching.locate import PatchError, locate
from rope_patch.patching.verify import inspect_model, verify_model
from rope_patch.runtime.folders import is_gguf
from rope_patch.tables import RotaryTable

AGREES = "agrees"
DIFFERS = "differs"
REFUSES = "refuses"
REFERENCE = "reference"
OURS = "transformers-5"


@dataclass(frozen=True)
class ProgramReading:
    """What one program does in the layers of one layer type.

    Attributes:
        program: the program, a key of ``PROGRAMS`` or ``OURS``.
        version: the version of the program; empty for transformers 5.
        layer_type: the type of the layers; None if all layers share a table.
        verdict: the verdict: ``"agrees"``, ``"differs"``, ``"refuses"`` (the program fails) or ``"unverified"``;
            ``"reference"`` for transformers 5, and for llama.cpp on a GGUF file.
        found: a sentence on what the program does.
        reason: a sentence on the reason; empty if none is known or needed.
        fix: the command that may remove the difference, or another step; empty if nothing is to be done.
        asked: whether the program was asked about this very checkpoint.
    """

    program: str
    version: str
    layer_type: str | None
    verdict: str
    found: str = ""
    reason: str = ""
    fix: str = ""
    asked: bool = False


@dataclass(frozen=True)
class ProgramComparison:
    """The tables that all programs compute from one checkpoint.

    Attributes:
        rows: the readings of the reference first, then those of each program.
        notes: sentences on what is unusual about the checkpoint.
    """

    rows: tuple[ProgramReading, ...]
    notes: tuple[str, ...]


def compare_programs(source: str | Path, pythons: Mapping[str, str | Path] | None = None) -> ProgramComparison:
    """Compare the tables that programs compute from a checkpoint with those of transformers 5; no weights are loaded.

    Args:
        source: the folder, hub id or GGUF file that the programs read.
        pythons: the Python by program in which it is installed, for programs that are asked about this checkpoint;
            the rows of the others say what they did with other configs in the same form.

    Raises:
        OSError: there is nothing that can be read.
        ValueError: the source is an adapter, the model's rotary table cannot be read, or a program does not answer.
    """
    if is_gguf(source):
        return _of_gguf(source, pythons or {})
    return _of_folder(source, pythons or {})


def programs_that_agree(source: str | Path) -> list[str]:
    """Return the programs that do with a folder what transformers 5 does, keys of ``PROGRAMS``."""
    rows = compare_programs(source).rows
    return [name for name in PROGRAMS if all(row.verdict == AGREES for row in rows if row.program == name)]


# --- folders ---------------------------------------------------------------------------------------------------------


def _of_folder(source: str | Path, pythons: Mapping[str, str | Path]) -> ProgramComparison:
    if "llama.cpp" in pythons:
        raise ValueError(f"llama.cpp is asked about a GGUF file, and {source} is not one: {to_ask('llama.cpp')}")
    model = model_without_weights(source, checked=False)
    inspection = inspect_model(model)
    location = locate(model)
    config = config_json(source)
    stated = StatedConfig.of(location.config, config, inspection.tables)
    rows = [ProgramReading(OURS, "", table.layer_type, REFERENCE) for table in inspection.tables]
    own = ask(OURS, [config], sys.executable) if pythons else []
    for name in PROGRAMS:
        if name in pythons:
            (answer,) = ask(name, [config], pythons[name])
            reading = reading_asked(answer, own[0], stated)
        else:
            reading = reading_of(name, stated)
        fix = ""
        if not reading.unknown and not reading.agrees(stated):
            fix = _fix(source, name, model)
        rows += [_row(name, reading, stated, kind, fix) for kind in stated.tables]
    unread = [f"transformers does not read {name}; an engine that does attends otherwise" for name in stated.unread]
    # Without the record: checks of their own say what differs from it.
    return ProgramComparison(tuple(rows), (*replace(location, record_data=None).warnings, *unread))


def _row(program: str, reading: Reading, stated: StatedConfig, kind: str | None, fix: str) -> ProgramReading:
    row = ProgramReading(program, reading.version, kind, UNVERIFIED, reading.unknown, asked=reading.asked)
    if reading.unknown:
        known_alone = reading.asked or changing(stated)  # asking tells nothing more
        return row if known_alone else replace(row, fix=to_ask(program))
    if reading.refused:
        return replace(row, verdict=REFUSES, found=f"it refuses this checkpoint: {reading.refused}", fix=fix)
    reason = "; ".join(reading.reasons)
    if reading.seen[kind] != SAME:
        return replace(row, verdict=DIFFERS, found=SENTENCES[reading.seen[kind]], reason=reason, fix=fix)
    if reading.context == stated.context:
        return replace(row, verdict=AGREES, found="it computes the same table")
    shorter = f"it computes the same table, for a context of {reading.context} tokens and not of {stated.context}"
    return replace(row, verdict=DIFFERS, found=shorter, reason=reason, fix=fix)


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


def _of_gguf(source: str | Path, pythons: Mapping[str, str | Path]) -> ProgramComparison:
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
            rows.append(ProgramReading(OURS, "", own.layer_type, REFERENCE))
            rows.append(_gguf_row("llama.cpp", found.tables[1], own, _SCALED_TOO, _SLIDING_FIX))
        else:
            in_file = replace(found.tables[0], layer_type=own.layer_type)
            rows.append(ProgramReading("llama.cpp", PROGRAMS["llama.cpp"].version, own.layer_type, REFERENCE))
            rows.append(_gguf_row(OURS, own, in_file, _BASE_ALONE, f"rope_patch.load({str(source)!r})"))
    if "llama.cpp" in pythons:
        rows.append(_asked_of_gguf(source, pythons["llama.cpp"], found.tables))
    for name, program in PROGRAMS.items():
        if name != "llama.cpp":
            reason = "what it reads of a GGUF file was not compared"
            rows += [ProgramReading(name, program.version, own.layer_type, UNVERIFIED, reason) for own in tables]
    return ProgramComparison(tuple(rows), found.warnings)


def _asked_of_gguf(source: str | Path, python: str | Path, tables: Sequence[RotaryTable]) -> ProgramReading:
    """Return whether llama.cpp itself computes the tables that the keys and factors of a file say."""
    (answer,) = ask_files("llama.cpp", [str(source)], python)
    row = ProgramReading("llama.cpp", answer.version, None, UNVERIFIED, answer.unread, asked=True)
    if answer.unread:
        return row
    if answer.error:
        return replace(row, verdict=REFUSES, found=f"it refuses this file: {answer.error}")
    meant = list(map(_as_asked, tables))
    rotating = [layer for layer in answer.layers if layer.inv_freq is not None]
    if all(any(layer.same_table(one) for one in meant) for layer in rotating):
        return replace(row, verdict=AGREES, found="it computes the table that its keys and factors say")
    return replace(row, verdict=DIFFERS, found="it computes another table than its keys and factors say")


def _gguf_row(program: str, theirs: RotaryTable, table: RotaryTable, reason: str, fix: str) -> ProgramReading:
    """Return what a program computes in place of the table of the reference."""
    version = PROGRAMS["llama.cpp"].version if program == "llama.cpp" else ""
    row = ProgramReading(program, version, table.layer_type, AGREES, "it computes the same table")
    same = _as_asked(theirs).same_table(_as_asked(table))
    if same and theirs.max_position_embeddings == table.max_position_embeddings:
        return row
    found = (
        f"it computes another table: attention factor {theirs.attention_scaling:.6g}, context "
        f"{theirs.max_position_embeddings}"
    )
    return replace(row, verdict=DIFFERS, found=found, reason=reason, fix=fix)


def _as_asked(table: RotaryTable) -> AskedLayer:
    """Return a table as that of a layer of a program that was asked."""
    return AskedLayer(frequencies.zero_unrotated(table.inv_freq), table.attention_scaling, None)


_BASE_ALONE = (
    "its own reader (gguf_file=) takes the base and the context of a GGUF file, and no factors, scaling or record"
)
_SCALED_TOO = "llama.cpp has one factor on cos and sin for all layers, so that the sliding ones are scaled, too"
_SLIDING_FIX = "none in this file: give the model a method without a factor on cos and sin, such as pi or abf"
