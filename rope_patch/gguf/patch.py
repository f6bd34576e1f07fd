"""Patch and verify GGUF files: keys and factors of the table change, everything else is copied byte for byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rope_patch.gguf.table import (
    Graph,
    base_in,
    graph_of,
    recorded_table,
    scaling_keys,
    table_in,
    with_table,
)
from rope_patch.methods import MethodLike, as_method
from rope_patch.methods.longrope import longrope_form
from rope_patch.patching.encode import PatchRequest, TableChange
from rope_patch.patching.locate import PatchError
from rope_patch.patching.record import PatchRecord, TableRecord, records_of
from rope_patch.runtime import progress
from rope_patch.runtime.gguf_file import GGUFFile, check_output_file, open_gguf, write_gguf
from rope_patch.tables import RotaryTable, Tables


def patch_gguf(
    source: str | Path,
    method: MethodLike,
    out: str | Path,
    *,
    overwrite: bool = False,
    **options: Any,
) -> TableChange:
    """Write a copy of a GGUF file with another rotary table, which an unmodified llama.cpp runs.

    The table before the patch is computed from the file's metadata and factors; no weights are loaded, and every other
    tensor and key is copied byte for byte, quantized or not.

    Args:
        source: the GGUF file that is read.
        method: the method that is applied, in any form that :func:`rope_patch.apply` takes.
        out: the file that is written, ``*.gguf``.
        overwrite: whether to replace a file that exists.
        **options: options of :func:`rope_patch.apply`, of which only ``target_length`` is allowed. By default it is the
            length that the method reaches, if that is more than the file states, since llama-server and llama-cli read
            no further than the file states.

    Returns:
        The table before and after, and the record.

    Raises:
        PatchError: the file is patched already.
        ValueError: the method or an option is wrong, llama.cpp's graph cannot take the table, or the file is not a
            whole GGUF file.
        OSError: there is no such file, ``out`` cannot be written, or the disk is full; ``out`` is then as it was.
    """
    chosen = as_method(method)
    request = PatchRequest(**options)
    target_length = request.target_length
    if request != PatchRequest(target_length=target_length):
        raise ValueError(
            "a GGUF file is patched once, in the table of full attention: leave out --layer-type, --freeze-at and "
            "--replace"
        )
    if Path(out).exists() and Path(out).samefile(source):
        raise ValueError(f"{out} is the GGUF file itself: give another output file")
    out = check_output_file(out, overwrite=overwrite)
    opened = open_gguf(source)
    inspection = table_in(opened)
    if inspection.record is not None or inspection.warnings:
        name = "a method that cannot be read"
        if inspection.record is not None:
            name = str(inspection.record.to_method())
        raise PatchError(f"{source} is already patched with {name}: patch the file that it was made from")
    graph = _graph(opened, inspection.tables[0])
    bases = {table.layer_type: _base(table) for table in inspection.tables}
    kind, before = next(iter(bases.items()))
    chosen = chosen.extended_to([before], target_length)
    reach = chosen.reach(before) or 0
    if target_length is None and reach > before.max_position_embeddings:
        target_length = reach
    after = chosen(before)
    # A table that the graph cannot compute raises here, before anything is written.
    scaling_keys(after, graph)
    record = PatchRecord(
        method=chosen.to_dict(),
        layer_types=(kind,),
        tables=records_of(bases | {kind: after}),
        base_tables=records_of(bases),
        base_config=_settings(bases, opened),
        target_length=target_length,
    )
    stated = replace(after, max_position_embeddings=record.stated_length)
    changed = with_table(opened, stated, graph, record)
    progress.say(f"writing {out}")
    write_gguf(changed, out, overwrite=overwrite)
    return TableChange(chosen, {kind: before}, {kind: after}, record)


def verify_gguf(source: str | Path) -> PatchRecord:
    """Check that the table in a GGUF file, as llama.cpp will use it, is the one its patch record describes.

    Its factors, base, scaling and stated context are compared with the record, and the method is applied again to the
    base table. Every tensor must lie within the file.

    Raises:
        PatchError: there is no record, or any difference.
        FileNotFoundError, ValueError: there is no such file, or it is not a whole GGUF model.
    """
    opened = open_gguf(source)
    inspection = table_in(opened)
    record = inspection.record
    table = inspection.tables[0]
    if record is None:
        reason = inspection.warnings[0] if inspection.warnings else "it is not patched, or the patch was lost"
        raise PatchError(f"{source} carries no patch record: {reason}")
    problems = list(inspection.warnings)
    recorded = recorded_table(record.tables)
    base = base_in(record, table)
    # The settings in the record do not describe a base that was frozen or edited by hand, so no method starts there.
    if record.freeze_at is None and not record.edited:
        recomputed = TableRecord.of(record.to_method()(base))
        if not recorded.matches(recomputed):
            problems.append(f"method: it gives table {recomputed.hash}, the record says {recorded.hash}")
    if table.max_position_embeddings != record.stated_length:
        problems.append(f"context_length is {table.max_position_embeddings}, the record says {record.stated_length}")
    if problems:
        raise PatchError(f"{source} does not hold the table of {record.to_method()}:\n  " + "\n  ".join(problems))
    return record


# --- the table before a patch ----------------------------------------------------------------------------------------


def _graph(opened: GGUFFile, table: RotaryTable) -> Graph:
    """Return the graph of a file that can be patched.

    Raises:
        ValueError: the graph was never checked, the file is one of Gemma 4, or it states no context.
    """
    graph = graph_of(str(opened.value("general.architecture")))
    if graph.always:  # the config of Gemma 4 states its table in a form of its own
        raise ValueError(
            f"{opened.path} is a GGUF of {graph.architecture!r}, which is not patched as a file: patch the "
            "checkpoint and write a file of it, rope-patch export CHECKPOINT --to gguf --converter PATH"
        )
    if table.max_position_embeddings < 1:
        raise ValueError(f"{opened.path} states no context_length: the record of a patch needs one")
    return graph


def _base(table: RotaryTable) -> RotaryTable:
    """Return the table of a file with the numbers that transformers computes, and with its encoding.

    A method then gives the same table for the file as for the checkpoint that the file was made from.
    """
    if table.is_geometric:
        return replace(table.plain(), original_max_position_embeddings=None)
    if table.rope_type in ("linear", "yarn"):
        return table
    rebuilt, form = longrope_form(table)
    if table.original_max_position_embeddings is not None:
        form["original_max_position_embeddings"] = table.original_max_position_embeddings
    base = table.becomes(rebuilt, rope_parameters=form)
    return replace(base, original_max_position_embeddings=form["original_max_position_embeddings"])


def _settings(bases: Tables, opened: GGUFFile) -> dict[str, Any]:
    """Return the rotary settings that the config of the model has before the patch."""
    parameters = {kind: dict(base.rope_parameters or {}) for kind, base in bases.items()}
    base = next(iter(bases.values()))
    settings = {
        "rope_parameters": parameters.get(None, parameters),
        "max_position_embeddings": base.max_position_embeddings,
    }
    if opened.value("general.architecture") == "phi3":  # its config has a key of its own for the original context
        settings["original_max_position_embeddings"] = base.context
    return settings
