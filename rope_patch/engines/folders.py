"""Write folders that plain transformers and other engines load, with one config that all of them read alike."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel

from rope_patch.checkpoints.folder_patch import copy_with_new_config
from rope_patch.checkpoints.model_without_weights import model_without_weights
from rope_patch.checkpoints.tokenizer_length import raise_length
from rope_patch.engines.encodings import config_keys, equal, with_context
from rope_patch.engines.program_contexts import other_contexts, parameters_in
from rope_patch.engines.programs import ENGINES, PROGRAMS, UNVERIFIED
from rope_patch.engines.readings import Reading, reading_of
from rope_patch.engines.stated_config import StatedConfig
from rope_patch.engines.verdicts import OTHER_TABLES, SAME, SENTENCES
from rope_patch.patching.locate import locate
from rope_patch.patching.older_keys import OLDER_FAIL, older_keys, text_part
from rope_patch.patching.verify import inspect_model, verify_model
from rope_patch.runtime.folders import is_gguf, write_atomically
from rope_patch.tables import RotaryTable
from rope_patch.version import __version__

NOTE_FILE = "export.json"


def read_tables(model: PreTrainedModel) -> tuple[RotaryTable, ...]:
    """Return the tables to export, after checking that they are what a patched model's record says.

    Args:
        model: the checkpoint's model without weights, patched as it shall be.

    Raises:
        PatchError: the tables are not what the record says.
        ValueError: a table changes with the length.
    """
    location = locate(model)
    if location.record is not None:
        verify_model(model)
    tables = with_context(inspect_model(model).tables, int(location.config.max_position_embeddings))
    for table in tables:
        if table.is_dynamic:
            raise ValueError(
                f"{table.name} changes with the length during generation ({table.rope_type}): fix it first, "
                "rope-patch apply MODEL default --freeze-at LENGTH -o FOLDER"
            )
    return tables


def export_folder(
    model: PreTrainedModel,
    source: str | Path,
    out: str | Path,
    *,
    to: str,
    overwrite: bool,
    dtype: str,
) -> dict[str, Any]:
    """Write a copy of a checkpoint whose config encodes its tables for transformers and for an engine.

    Args:
        model: the checkpoint's model without weights, patched as it shall be.
        source: the folder or hub id of the weights, or their GGUF file.
        out: the folder to write; new or empty unless ``overwrite`` is given.
        to: the engine, a key of :data:`~rope_patch.engines.programs.ENGINES`.
        overwrite: whether to write into a folder that holds files.
        dtype: the data type to which the weights of a GGUF file are dequantized.

    Returns:
        What ``export.json`` says.

    Raises:
        PatchError: the tables are not those of the patch record.
        ValueError: the engine cannot express a table, or ``out`` is in the way.
        OSError: the source cannot be read, the weights are damaged, or ``out`` cannot be written.
    """
    tables = read_tables(model)
    config, notes, version = _config_for(model, tables, to)
    if is_gguf(source):
        config["dtype"] = dtype
    parameters = text_part(config)["rope_parameters"]
    table_summaries = []
    for table in tables:
        encoded = parameters
        if table.layer_type is not None:
            encoded = parameters[table.layer_type]
        table_summaries.append(
            {"layer_type": table.layer_type, "rope_type": encoded["rope_type"], "hash": table.fingerprint}
        )
    summary: dict[str, Any] = {
        "engine": ENGINES[to],
        "checked_against": version,
        "model_type": model.config.model_type,
        "context": tables[0].max_position_embeddings,
        "tables": table_summaries,
        "notes": notes,
        "rope_patch": __version__,
    }
    with copy_with_new_config(source, out, overwrite=overwrite, dtype=dtype) as folder:
        write_atomically(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
        if (record := locate(model).record) is not None:
            raise_length(folder, record)
        _check(folder, tables)
        write_atomically(folder / NOTE_FILE, json.dumps(summary, indent=1) + "\n")
    return summary


def _config_for(
    model: PreTrainedModel, tables: Sequence[RotaryTable], to: str
) -> tuple[dict[str, Any], list[str], str]:
    """Return the config.json for an engine, remarks for the user, and the version that was seen to read it so.

    Raises:
        ValueError: the engine fails on the config, or computes another table from it.
    """
    config, notes = exported_config(model, tables, to)
    if to == "hf":
        return config, notes, transformers.__version__
    reading = _reading(model, config, tables, to)
    # vLLM fails on longrope where pairs are neighbours, and loses the share of some families; the own form may run.
    if reading.refused or set(reading.seen.values()) & set(OTHER_TABLES):
        own, own_notes = exported_config(model, tables, "hf")
        in_own_form = _reading(model, own, tables, to)
        if set(in_own_form.seen.values()) == {SAME}:
            config, notes, reading = own, own_notes, in_own_form
            if reading.context != tables[0].max_position_embeddings:
                notes.append(f"start it with a context of {tables[0].max_position_embeddings}: {reading.reasons[0]}")
    if reading.refused:
        raise ValueError(f"{ENGINES[to]} {reading.version} fails on this config: {reading.refused}")
    if reading.unknown:
        return config, notes, UNVERIFIED
    for kind, seen in reading.seen.items():
        if seen in OTHER_TABLES:
            raise ValueError(
                f"{ENGINES[to]} {reading.version} would lose the table of {kind or 'all'} layers: {SENTENCES[seen]}. "
                "What changes the base alone (abf, ntk) may run there; other engines may read the table"
            )
    notes += [SENTENCES[each] for each in dict.fromkeys(reading.seen.values()) if each != SAME]
    return config, notes, PROGRAMS[to].version


def _reading(model: PreTrainedModel, config: dict[str, Any], tables: Sequence[RotaryTable], to: str) -> Reading:
    text = type(model.config).from_dict(config).get_text_config()
    return reading_of(to, StatedConfig.of(text, config, tables))


def exported_config(model: PreTrainedModel, tables: Sequence[RotaryTable], to: str) -> tuple[dict[str, Any], list[str]]:
    """Return the config.json that encodes tables for an engine, and remarks for the user."""
    location = locate(model)
    if to != "hf":  # whose programs multiply the stated context, or take another key for it
        location.check_contexts()
    settings = config_keys(location, tables, everywhere=to != "hf")
    parameters: dict[str, Any] = settings["rope_parameters"]
    config: dict[str, Any] = json.loads(model.config.to_json_string())
    text = text_part(config)
    text |= settings
    older = older_keys(location.config.model_type, parameters, text.get("layer_types") or ())
    notes = []
    text |= {key: value for key, value in older.items() if value != OLDER_FAIL or to == "hf"}
    if not older or OLDER_FAIL in older.values():
        notes.append("transformers 4 cannot express these tables")
    longrope = any(p.get("rope_type") == "longrope" for p in parameters_in(text))
    if to != "hf" and "original_max_position_embeddings" in text and longrope:
        # Phi-3 keeps the original context here, where it wins over the one in rope_parameters. vLLM takes it for the
        # context that it serves.
        text["original_max_position_embeddings"] = tables[0].max_position_embeddings
    context = tables[0].max_position_embeddings
    if to != "hf" and (others := [key for key, length in other_contexts(text).items() if length != context]):
        text |= dict.fromkeys(others, context)
        notes.append(f"{' and '.join(others)}, which engines take for the context, set to {context}, too")
    return config, notes


def _check(folder: Path, tables: Sequence[RotaryTable]) -> None:
    """Raise ValueError unless plain transformers builds the same tables from the folder, and those of its record."""
    model = model_without_weights(folder)
    if locate(model).record is not None:
        verify_model(model)
    read = {table.layer_type: table for table in inspect_model(model).tables}
    for table in tables:
        if not equal(table, read[table.layer_type]):
            raise ValueError(f"transformers reads another table back: {read[table.layer_type]}, exported {table}")
