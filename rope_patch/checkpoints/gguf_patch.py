"""Patch, restore and verify GGUF files: keys and factors of the table change, all else is copied byte for byte."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rope_patch import frequencies
from rope_patch.checkpoints.gguf_file import GGUFFile, Key, Piece, check_out, gguf, open_gguf, write_gguf
from rope_patch.checkpoints.gguf_table import (
    CHECKED,
    FACTOR_TENSORS,
    GRAPHS,
    LAYERED,
    Graph,
    base_in,
    graph_in,
    replaced_by,
    same_table,
    table_in,
    table_keys,
    table_of,
    table_pieces,
)
from rope_patch.methods import MethodLike, as_method, longrope_parameters
from rope_patch.methods.two_tables import check_one_table
from rope_patch.patching.encode import TableChange
from rope_patch.patching.locate import PatchError
from rope_patch.patching.record import PatchRecord, TableRecord
from rope_patch.tables import RotaryTable

BEFORE_KEY = "rope_patch.patching.before"
"""What a patch took out of a file: its keys, as their bytes, and its factors; each with its place."""

OnBytes = Callable[[int, int], None]


def patch_gguf(
    source: str | Path,
    method: MethodLike,
    out: str | Path,
    *,
    overwrite: bool = False,
    on_bytes: OnBytes = lambda written, total: None,
    target_length: int | None = None,
    layer_types: Sequence[str] | None = None,
    freeze_at: int | None = None,
    replace: bool = False,
) -> TableChange:
    """Write a copy of a GGUF file with another rotary table, which an unmodified llama.cpp runs.

    The table before the patch is computed from the file's metadata and factors; no weights are loaded, and every other
    tensor and key is copied byte for byte, quantized or not.

    Args:
        source: the file.
        method: what to apply.
        out: the file to write, ``*.gguf``.
        overwrite: replace a file that exists.
        on_bytes: called with the bytes of tensors that are written so far, and those of all.
        target_length: the context to state, by default what the method reaches where that is more than the file
            states: llama-server and llama-cli read no further than that. Else as for :func:`rope_patch.apply` [tokens].
        layer_types: refused: the files that are patched have one table.
        freeze_at: refused: a file whose table changes with the length is not patched.
        replace: replace the patch that the file has, starting from the table before it.

    Returns:
        The table before and after, and the record.

    Raises:
        PatchError: the file is patched already.
        ValueError: bad method or options, a table that llama.cpp's graph cannot take, no whole GGUF file.
        OSError: no such file, an unwritable ``out``, a full disk; ``out`` is then as it was.
    """
    chosen = as_method(method)
    for option, given in (("layer_type", layer_types), ("freeze_at", freeze_at)):
        if given is not None:
            flag = f"--{option.replace('_', '-')}"
            raise ValueError(f"a GGUF file is patched as the one table it holds, without options such as {flag}")
    out = _check_places(source, out, overwrite)
    opened = open_gguf(source)
    found = table_in(opened, source)
    if found.record is not None or found.warnings:
        name = found.record.to_method() if found.record is not None else "a method that cannot be read"
        if not replace:
            raise PatchError(
                f"{source} is already patched with {name}: restore it first, or pass replace=True (--replace)"
            )
        opened = before_patch(opened, source)
        found = table_in(opened, source)
    _check_one_table(opened, found.tables[0], source)
    before = _base(found.tables[0])
    check_one_table(chosen, "a GGUF file")
    chosen = chosen.extended_to([before], target_length)
    reach = chosen.reach(before) or 0
    if target_length is None and reach > before.max_position_embeddings:
        target_length = reach
    after = chosen(before)
    graph = graph_in(str(opened.value("general.architecture")), after)
    record = PatchRecord(
        method=chosen.to_dict(),
        layer_types=(None,),
        tables={"all": TableRecord.of(after)},
        base_tables={"all": TableRecord.of(before)},
        base_config=_settings(before, opened),
        target_length=target_length,
    )
    changed = with_table(opened, with_context(after, target_length), graph, record)
    write(changed, out, overwrite=overwrite, on_bytes=on_bytes)
    return TableChange(chosen, {None: before}, {None: after}, record)


def restore_gguf(
    source: str | Path, out: str | Path, *, overwrite: bool = False, on_bytes: OnBytes = lambda written, total: None
) -> None:
    """Write a copy of a patched GGUF file with the table, keys and factors that it had before the patch.

    Raises:
        PatchError: the file carries no record.
        ValueError, OSError: as :func:`patch_gguf`.
    """
    out = _check_places(source, out, overwrite)
    write(before_patch(open_gguf(source), source), out, overwrite=overwrite, on_bytes=on_bytes)


def verify_gguf(source: str | Path) -> PatchRecord:
    """Check that the table in a GGUF file, as llama.cpp will use it, is the one its patch record describes.

    Its factors, its base and its scaling are compared with the record; the method is applied again to the base table;
    the stated context, and the table that :func:`restore_gguf` would put back, are compared too. Every tensor must lie
    within the file.

    Raises:
        PatchError: no record, or any difference.
        FileNotFoundError, ValueError: no such file, or no whole GGUF model.
    """
    opened = open_gguf(source)
    found = table_in(opened, source)
    record, (table,) = found.record, found.tables
    if record is None:
        reason = found.warnings[0] if found.warnings else "it is not patched, or the patch was lost"
        raise PatchError(f"{source} carries no patch record: {reason}")
    problems = list(found.warnings)
    recorded, base = table_of(record.tables), base_in(record, table)
    if record.freeze_at is None and not record.edited and recorded is not None:
        again = TableRecord.of(record.to_method()(base))
        problems += [f"method: it gives table {again.hash}, the record says {recorded.hash}"] * (
            not recorded.matches(again)
        )
    length = record.target_length or base.max_position_embeddings
    if table.max_position_embeddings != length:
        problems.append(f"context_length is {table.max_position_embeddings}, the record says {length}")
    restored = table_in(before_patch(opened, source), source).tables[0]
    if not same_table(TableRecord.of(restored), TableRecord.of(base)):
        problems.append(f"base table: the file keeps {restored.fingerprint}, the record says {base.fingerprint}")
    if problems:
        raise PatchError(f"{source} does not hold the table of {record.to_method()}:\n  " + "\n  ".join(problems))
    return record


def stated_context(change: TableChange) -> int:
    """Return the context that a patched file states [tokens]."""
    return change.record.target_length or int(change.record.base_config["max_position_embeddings"])


# --- keys and tensors ------------------------------------------------------------------------------------------------


def with_table(opened: GGUFFile, table: RotaryTable, graph: Graph, record: PatchRecord | None) -> GGUFFile:
    """Return a file with another table; what that takes the place of is kept in :data:`BEFORE_KEY`.

    Args:
        opened: a file that is not patched.
        table: to put in, with the context to state.
        graph: what llama.cpp's graph reads of it.
        record: of the patch; None where there is none.
    """
    new = {key.name: key for key in table_keys(table, graph, record)}
    tensors = {piece.name: piece for piece in table_pieces(table, graph)}
    if record is not None:
        new[BEFORE_KEY] = Key.of(BEFORE_KEY, json.dumps(_taken_out(opened)), "STRING")
    keys = {name: new.pop(name, key) for name, key in opened.keys.items() if name in new or not _is_ours(name, opened)}
    pieces = [
        tensors.pop(piece.name, piece)
        for piece in opened.pieces
        if piece.name in tensors or piece.name not in FACTOR_TENSORS
    ]
    return replace(opened, keys=keys | new, pieces=(*tensors.values(), *pieces))


def before_patch(opened: GGUFFile, path: str | Path) -> GGUFFile:
    """Return a patched file as it was before the patch; one of an older rope_patch with the base table it recorded.

    Raises:
        PatchError: the file carries no record, or what it kept is damaged.
    """
    keys = [key for name, key in opened.keys.items() if not _is_ours(name, opened)]
    pieces = [piece for piece in opened.pieces if piece.name not in FACTOR_TENSORS]
    bare = replace(opened, keys={key.name: key for key in keys}, pieces=tuple(pieces))
    if BEFORE_KEY not in opened.keys:
        found = table_in(opened, path)
        if found.record is None:
            raise PatchError(f"{path} carries no patch record: nothing to restore")
        base = base_in(found.record, found.tables[0])
        return with_table(bare, base, graph_in(str(opened.value("general.architecture")), base), None)
    try:
        data = json.loads(opened.value(BEFORE_KEY))
        for index, raw in data["keys"]:
            keys.insert(index, Key.read(base64.b64decode(raw, validate=True)))
        for index, name, shape, kind, raw in data["tensors"]:
            pieces.insert(index, _piece(name, tuple(map(int, shape)), kind, base64.b64decode(raw, validate=True)))
    except (ValueError, TypeError, KeyError) as error:
        raise PatchError(f"{path}: what its patch kept of the table before it is damaged ({error})") from error
    return replace(opened, keys={key.name: key for key in keys}, pieces=tuple(pieces))


def write(opened: GGUFFile, out: str | Path, **options: Any) -> Path:
    """Write a file as it is; options are those of :func:`~rope_patch.checkpoints.gguf_file.write_gguf`."""
    return write_gguf(out, list(opened.keys.values()), opened.pieces, alignment=opened.alignment, **options)


def _is_ours(name: str, opened: GGUFFile) -> bool:
    return name == BEFORE_KEY or replaced_by(name, str(opened.value("general.architecture")))


def _taken_out(opened: GGUFFile) -> dict[str, Any]:
    def text(data: Any) -> str:
        return base64.b64encode(data).decode()

    return {
        "keys": [[i, text(key.packed)] for i, (name, key) in enumerate(opened.keys.items()) if _is_ours(name, opened)],
        "tensors": [
            [i, piece.name, list(piece.shape), piece.kind.name, text(np.ascontiguousarray(piece.read()))]
            for i, piece in enumerate(opened.pieces)
            if piece.name in FACTOR_TENSORS
        ],
    }


def _piece(name: str, shape: tuple[int, ...], kind: str, data: bytes) -> Piece:
    numbers = np.frombuffer(data, "<f4" if kind == "F32" else np.uint8)
    piece = Piece(name, shape, gguf().GGMLQuantizationType[kind], lambda: numbers)
    if name not in FACTOR_TENSORS or piece.size != len(data):
        raise ValueError(f"{name} of shape {shape} has {len(data)} bytes")
    return piece


# --- the table before a patch ----------------------------------------------------------------------------------------


def _check_one_table(opened: GGUFFile, table: RotaryTable, path: str | Path) -> None:
    """Raise ValueError for a file of a family that has a table for each layer type, or that states no context."""
    architecture = str(opened.value("general.architecture"))
    if architecture in LAYERED:
        on_top = (
            "patch the checkpoint and write a file of it, rope-patch export CHECKPOINT --to gguf --converter PATH"
            if architecture in {graph.architecture for graph in GRAPHS.values()}
            else f"llama.cpp's graph for it reads no rotary factors (seen at {CHECKED}). A plain table of another base "
            "needs none: give the engine --rope-freq-base"
        )
        raise ValueError(f"{path} is a GGUF of {architecture!r}, which has a table for each layer type: {on_top}")
    if table.max_position_embeddings < 1:
        raise ValueError(f"{path} states no context_length: the record of a patch needs one")


def _base(table: RotaryTable) -> RotaryTable:
    """Return the table of a file in the numbers that transformers computes, and its encoding."""
    if table.is_geometric:
        encoding: dict[str, Any] = {"rope_type": "default", "rope_theta": table.rope_theta}
        plain = table.becomes(frequencies.geometric(table.rope_theta, table.rotary_dim), rope_parameters=encoding)
        return replace(plain, original_max_position_embeddings=None)
    factors = frequencies.longrope_factors(table.inv_freq, table.rope_theta)
    form = longrope_parameters(factors, table, attention_scaling=table.attention_scaling)
    if table.original_max_position_embeddings is not None:
        form["original_max_position_embeddings"] = table.original_max_position_embeddings
    rebuilt = frequencies.longrope(table.rope_theta, factors)
    base = table.becomes(rebuilt, rope_parameters=form)
    return replace(base, original_max_position_embeddings=form["original_max_position_embeddings"])


def _settings(base: RotaryTable, opened: GGUFFile) -> dict[str, Any]:
    """Return what the config of the model says before the patch."""
    settings = {
        "rope_parameters": dict(base.rope_parameters or {}),
        "max_position_embeddings": base.max_position_embeddings,
    }
    if opened.value("general.architecture") == "phi3":  # whose config has a key of its own for it
        settings["original_max_position_embeddings"] = base.context
    return settings


def with_context(table: RotaryTable, length: int | None) -> RotaryTable:
    """Return a table as it is where the stated context is ``length`` tokens; None leaves it."""
    return table if length is None else replace(table, max_position_embeddings=length)


def _check_places(source: str | Path, out: str | Path, overwrite: bool) -> Path:
    """Return the file to write, after refusing an output that cannot be."""
    if Path(out).exists() and Path(out).samefile(source):
        raise ValueError(f"{out} is the GGUF file itself: give another output file")
    return check_out(out, overwrite=overwrite)
