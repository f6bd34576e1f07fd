"""Read and write GGUF files: errors name the problem, and writing takes one tensor at a time and ends in one rename."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rope_patch.files import file_in_one_move, file_stands

Progress = Callable[[str], None]


def gguf() -> Any:
    """Return the ``gguf`` package.

    Raises:
        ImportError: it is not installed; the message says how to.
    """
    try:
        import gguf as package
    except ImportError as error:
        raise ImportError("GGUF files need the package gguf: pip install 'rope_patch[gguf]'") from error
    return package


@dataclass(frozen=True)
class Key:
    """One key of a GGUF file; ``kind`` and ``item`` are ``gguf.GGUFValueType``, ``item`` that of an array's items."""

    name: str
    value: Any
    kind: Any
    item: Any = None

    @classmethod
    def of(cls, name: str, value: Any, kind: str, item: str | None = None) -> Key:
        """Make a key from the names of its types: ``"UINT32"``, ``"FLOAT32"``, ``"STRING"``, ``"ARRAY"``."""
        types = gguf().GGUFValueType
        return cls(name, value, types[kind], types[item] if item else None)


@dataclass(frozen=True)
class Piece:
    """One tensor to write: its numbers are read only when its turn comes.

    Attributes:
        name: in llama.cpp's words, ``blk.0.attn_q.weight``.
        shape: of the numbers, rows first; ggml counts the other way round.
        kind: ``gguf.GGMLQuantizationType``.
        read: returns the array, of bytes where the type is quantized.
    """

    name: str
    shape: tuple[int, ...]
    kind: Any
    read: Callable[[], np.ndarray[Any, Any]]

    @property
    def size(self) -> int:
        """Length in the file [bytes]."""
        block, width = gguf().GGML_QUANT_SIZES[self.kind]
        return int(np.prod(self.shape)) * int(width) // int(block)


def open_gguf(path: str | Path) -> Any:
    """Open a GGUF file, mapped into memory: no tensor is loaded.

    Returns:
        A ``gguf.GGUFReader``.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no GGUF file, one that is cut off, a part of a split one, or one of the other byte order.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
    package = gguf()
    try:
        reader = package.GGUFReader(path)
    except Exception as error:  # what a short or damaged file meets first is numpy's business
        raise ValueError(f"{path} is a truncated or damaged GGUF file ({error}): copy or download it again") from error
    if reader.byte_order != "I":
        raise ValueError(f"{path} is written in the other byte order: convert it with gguf-convert-endian")
    if int(value_of(reader, "split.count", 1)) > 1:
        raise ValueError(f"{path} is one part of a split model: join them with llama-gguf-split --merge")
    return reader


def value_of(reader: Any, name: str, default: Any = None) -> Any:
    """Return the value of a key, or ``default`` where the file has none."""
    field = reader.get_field(name)
    return default if field is None else field.contents()


def keys_of(reader: Any) -> Iterator[Key]:
    """Yield the keys of a file, without those the format itself keeps; empty arrays, which nothing reads, are left."""
    kinds = gguf().GGUFValueType
    for field in reader.fields.values():
        if field.name.startswith("GGUF."):
            continue
        is_array = field.types[0] == kinds.ARRAY
        if not (is_array and len(field.data) == 0):
            yield Key(field.name, field.contents(), field.types[0], field.types[-1] if is_array else None)


def pieces_of(reader: Any) -> Iterator[Piece]:
    """Yield the tensors of a file, to be copied byte for byte."""
    for tensor in reader.tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        yield Piece(tensor.name, shape, tensor.tensor_type, lambda data=tensor.data: data)  # type: ignore[misc]


def write_gguf(
    out: str | Path,
    keys: Sequence[Key],
    pieces: Sequence[Piece],
    *,
    alignment: int = 32,
    overwrite: bool = False,
    progress: Progress = lambda _: None,
) -> Path:
    """Write a GGUF file under a temporary name beside ``out``, tensor after tensor, and rename it.

    Args:
        out: the file, ``*.gguf``.
        keys: all of them, ``general.architecture`` included.
        pieces: the tensors, in the order of the file.
        alignment: of every tensor in the file [bytes].
        overwrite: replace a file that exists.
        progress: called with the name of each tensor before it is written.

    Raises:
        FileExistsError: ``out`` exists, and ``overwrite`` is not set.
        OSError: it cannot be written, or the disk is full; ``out`` is then as it was, and nothing is left beside it.
    """
    out = check_out(out, overwrite=overwrite)
    package = gguf()
    architecture = next(key.value for key in keys if key.name == package.Keys.General.ARCHITECTURE)
    needed, free = sum(piece.size for piece in pieces), shutil.disk_usage(out.parent).free
    if needed > free:
        raise OSError(f"{out} needs {needed / 2**20:.0f} MiB, and {out.parent} has {free / 2**20:.0f} left")
    with (
        file_in_one_move(out, overwrite=overwrite) as name,
        contextlib.closing(package.GGUFWriter(name, architecture)) as writer,
    ):
        writer.data_alignment = alignment
        for key in keys:
            if key.name != package.Keys.General.ARCHITECTURE:  # the writer's own, and the first
                writer.add_key_value(key.name, key.value, key.kind, sub_type=key.item)
        for piece in pieces:
            writer.add_tensor_info(piece.name, piece.shape, np.dtype(np.float32), piece.size, raw_dtype=piece.kind)
        writer.write_header_to_file(name)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for piece in pieces:
            progress(piece.name)
            writer.write_tensor_data(piece.read())
        writer.close()
        with open(name, "rb+") as file:
            os.fsync(file.fileno())
    return out


def check_out(out: str | Path, *, overwrite: bool) -> Path:
    """Raise unless a GGUF file can be written there.

    Raises:
        ValueError: a name that does not end in ``.gguf``.
        OSError: a file, a folder or a missing folder is in the way.
    """
    out = Path(out)
    if out.suffix != ".gguf":
        raise ValueError(f"the output must be a file *.gguf, got {str(out)!r}")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"no folder {out.parent} to write {out.name} into")
    if out.is_dir():
        raise IsADirectoryError(f"{out} is a folder: give the name of a file")
    if file_stands(out) and not overwrite:
        raise FileExistsError(f"{out} exists: give another name, or allow overwriting (--force)")
    return Path(os.path.realpath(out))
