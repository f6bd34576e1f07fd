"""Folders that plain transformers and other engines load: weights copied, and one config that all read alike."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from rope_patch import __version__
from rope_patch.checkpoints.offline import copied, skeleton
from rope_patch.exporting.engines import ENGINES, UNVERIFIED, check
from rope_patch.exporting.spellings import config_keys, with_context
from rope_patch.files import write_atomically
from rope_patch.patching.base_tables import is_dynamic, where
from rope_patch.patching.encoding import OLDER_FAIL, older_keys, text_part
from rope_patch.patching.locate import PatchError, find_rotary
from rope_patch.patching.verify import inspect_model, verify_model
from rope_patch.tables import RotaryTable

NOTE_FILE = "export.json"


def read_tables(model: PreTrainedModel) -> tuple[RotaryTable, ...]:
    """Return the tables to export, after checking that they are what a patched model's record says.

    Raises:
        PatchError: they are not.
        ValueError: a table that changes with the length, or one that only numbers describe.
    """
    site = find_rotary(model)
    if site.record is not None:
        verify_model(model)
        if site.record.precision != "float32":
            raise ValueError(f"angles in {site.record.precision} cannot be exported: every engine computes in float32")
    slots = with_context(inspect_model(model).tables, int(site.config.max_position_embeddings))
    for slot in slots:
        if slot.rope_parameters is not None and is_dynamic(slot.rope_parameters, slot.rope_type):
            raise ValueError(
                f"{where(slot)} changes with the length during generation ({slot.rope_type}): fix it first, "
                "rope-patch apply MODEL default --freeze-at LENGTH -o FOLDER"
            )
    return slots


def export_folder(
    model: PreTrainedModel,
    source: str | Path,
    out: str | Path,
    *,
    to: str,
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda _: None,
    finish: Callable[[Path], None] = lambda _: None,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Write a copy of a checkpoint whose config says its tables in every spelling known.

    Args:
        model: the checkpoint's skeleton, patched as it shall be.
        source: where the weights are, folder or hub id.
        out: folder to write; new or empty unless ``overwrite``.
        to: key of :data:`~rope_patch.exporting.engines.ENGINES`.
        overwrite: write into a folder that holds files.
        progress: told the name of each file before it is copied.
        finish: what else to do in the folder before it is moved to ``out``.
        notes: to write down beside those found here.

    Returns:
        What ``export.json`` says.

    Raises:
        ValueError: the engine cannot express a table, ``out`` is in the way.
        OSError: unreadable source, damaged weights, unwritable ``out``.
    """
    slots = read_tables(model)
    version = check(to, str(model.config.model_type), slots)
    config, parameters, found = _config(model, slots, to)
    said: dict[str, Any] = {
        "engine": ENGINES[to].name,
        "checked_against": version,
        "shown_by": ENGINES[to].shown_by if version != UNVERIFIED else None,
        "model_type": model.config.model_type,
        "context": slots[0].max_position_embeddings,
        "tables": [
            {"layer_type": slot.layer_type, "rope_type": spelled["rope_type"], "hash": slot.fingerprint}
            for slot in slots
            for spelled in [parameters if slot.layer_type is None else parameters[slot.layer_type]]
        ],
        "notes": [*notes, *found],
        "rope_patch": __version__,
    }
    with copied(source, out, overwrite=overwrite, progress=progress) as folder:
        write_atomically(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
        if "rope_patch" in text_part(config) and not _verifies(folder):
            del text_part(config)["rope_patch"]
            said["notes"] = [*said["notes"], "the patch record does not fit this spelling and was left out"]
            write_atomically(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
        _check(folder, slots)
        finish(folder)
        write_atomically(folder / NOTE_FILE, json.dumps(said, indent=1) + "\n")
    return said


def _config(
    model: PreTrainedModel, slots: Sequence[RotaryTable], to: str
) -> tuple[dict[str, Any], Mapping[str, Any], list[str]]:
    site = find_rotary(model)
    settings = config_keys(site, slots, everywhere=to != "hf")
    parameters: dict[str, Any] = settings["rope_parameters"]
    config: dict[str, Any] = json.loads(model.config.to_json_string())
    text = text_part(config)
    text |= settings
    older = older_keys(site.config.model_type, parameters)
    text |= {key: value for key, value in older.items() if value != OLDER_FAIL or to == "hf"}
    said = bool(older) and OLDER_FAIL not in older.values()
    notes = [] if said else ["transformers 4 cannot say these tables"]
    longrope = any(p.get("rope_type") == "longrope" for p in _each(parameters))
    if to != "hf" and "original_max_position_embeddings" in text and longrope:
        # Phi-3 keeps it here, where it wins over the one in rope_parameters, and vLLM takes it for the context.
        text["original_max_position_embeddings"] = slots[0].max_position_embeddings
    return config, parameters, notes


def _each(parameters: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    return nested or [parameters]


def _verifies(folder: Path) -> bool:
    try:
        verify_model(skeleton(folder))
    except PatchError:
        return False
    return True


def _check(folder: Path, slots: Sequence[RotaryTable]) -> None:
    """Raise unless a stock loader builds the wanted tables from the folder."""
    read = {slot.layer_type: slot for slot in inspect_model(skeleton(folder)).tables}
    for slot in slots:
        again = read[slot.layer_type]
        same = again.inv_freq.shape == slot.inv_freq.shape and bool(
            ((again.inv_freq - slot.inv_freq).abs() <= 3e-7 * slot.inv_freq).all()
        )
        if not same or abs(again.attention_scaling - slot.attention_scaling) > 1e-6:
            raise ValueError(f"transformers reads another table back: {again}, exported {slot}")
