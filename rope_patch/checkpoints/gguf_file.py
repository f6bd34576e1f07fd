"""Read and write GGUF files: errors name the problem, and writing takes one tensor at a time and ends in one rename.

The header is read and written here, not by the package ``gguf``, which gives the names of types and the sizes of
blocks alone: its reader makes an array of numpy for every token of a vocabulary, and takes eight seconds for one of
49152 tokens where this takes a fifth of one; and what is copied from file to file are the very bytes of a key, of a
kind that its writer knows or not.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rope_patch.runtime.folders import file_in_one_move

ARCHITECTURE, ALIGNMENT = "general.architecture", "general.alignment"
_VERSION = 3
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""By the number of a ``GGUFValueType``, what :mod:`struct` calls it."""
_STRING, _ARRAY = 8, 9
_PLAIN = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
"""Types of tensors that numpy knows; others are read as bytes."""
_STEP = 1 << 24
"""Bytes that are written at once, so that progress shows and Ctrl-C is heard within a large tensor."""


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
    """One key of a GGUF file; ``kind`` and ``item`` are ``gguf.GGUFValueType``, ``item`` that of an array's items.

    ``raw`` are its bytes in the file it was read from: name, kind and value.
    """

    name: str
    value: Any
    kind: Any
    item: Any = None
    raw: bytes | None = field(default=None, repr=False)

    @classmethod
    def of(cls, name: str, value: Any, kind: str, item: str | None = None) -> Key:
        """Make a key from the names of its types: ``"UINT32"``, ``"FLOAT32"``, ``"STRING"``, ``"ARRAY"``."""
        types = gguf().GGUFValueType
        return cls(name, value, types[kind], types[item] if item else None)

    @property
    def packed(self) -> bytes:
        """The bytes of the key in a file."""
        if self.raw is not None:
            return self.raw
        return _packed_string(self.name) + struct.pack("<I", self.kind) + _packed(self.value, self.kind, self.item)


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
        return int(np.prod(self.shape, dtype=object)) * int(width) // int(block)


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file that was opened: its keys, and its tensors, which are not loaded.

    Attributes:
        keys: by name, in the order of the file.
        pieces: the tensors, in the order of the file.
        alignment: of every tensor [bytes].
    """

    keys: Mapping[str, Key]
    pieces: tuple[Piece, ...]
    alignment: int = 32

    def value(self, name: str, default: Any = None) -> Any:
        """Return the value of a key, or ``default`` where the file has none."""
        return self.keys[name].value if name in self.keys else default

    @property
    def is_quantized(self) -> bool:
        """Whether any tensor holds blocks of numbers, and not one number after the other."""
        return any(gguf().GGML_QUANT_SIZES[piece.kind][0] > 1 for piece in self.pieces)

    @property
    def weights(self) -> str:
        """The type of the weights: what the file calls itself (``Q4_K_M``) where that names what most of them are."""
        counts: dict[str, int] = {}
        for piece in self.pieces:
            counts[piece.kind.name] = counts.get(piece.kind.name, 0) + int(np.prod(piece.shape, dtype=object))
        most = max(counts, key=lambda name: counts[name], default="no")
        stated = {kind.value: kind.name.partition("_")[2] for kind in gguf().LlamaFileType}
        name = stated.get(self.value("general.file_type"), "")
        return name if name.startswith(most) else most


def open_gguf(path: str | Path) -> GGUFFile:
    """Open a GGUF file, mapped into memory: no tensor is loaded.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no GGUF file, one that is cut off, a part of a split one, or one of the other byte order.
        ImportError: the package gguf is missing, or older than a type of the tensors.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    with path.open("rb") as file:
        beginning = file.read(8)
    if beginning[:4] != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
    if len(beginning) == 8 and beginning[4:6] == b"\0\0":
        raise ValueError(f"{path} is written in the other byte order: convert it with gguf-convert-endian")
    gguf()
    try:
        opened = _Header(np.memmap(path, mode="r")).read()
    except (ValueError, struct.error, KeyError, MemoryError, OverflowError) as error:
        raise ValueError(f"{path} is a truncated or damaged GGUF file ({error}): copy or download it again") from error
    if int(opened.value("split.count", 1)) > 1:
        raise ValueError(f"{path} is one part of a split model: join them with llama-gguf-split --merge")
    return opened


class _Header:
    """What is read of a file from its first byte on."""

    def __init__(self, data: np.ndarray[Any, Any]) -> None:
        self.data, self.bytes, self.at = data, data.data, 0

    def read(self) -> GGUFFile:
        self.take(4)
        version, tensors, count = self.numbers("IQQ")
        if version not in (2, 3):
            raise ValueError(f"it is of version {version}, and versions 2 and 3 are read")
        keys: dict[str, Key] = {}
        for _ in range(count):
            key = self.key()
            if key.name in keys:
                raise ValueError(f"it holds the key {key.name} twice")
            keys[key.name] = key
        listed = [self.tensor() for _ in range(tensors)]
        if len({name for name, *_ in listed}) < len(listed):
            raise ValueError("it holds two tensors of one name")
        alignment = keys[ALIGNMENT].value if ALIGNMENT in keys else 32
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"its {ALIGNMENT} is {alignment!r}, no power of two")
        start = self.at + -self.at % alignment
        return GGUFFile(keys, tuple(self.piece(start + offset, *rest) for *rest, offset in listed), alignment)

    def take(self, size: int) -> memoryview:
        """Return the next bytes."""
        if self.at + size > len(self.bytes):
            raise ValueError(f"it ends after {len(self.bytes)} bytes, within its header")
        taken = self.bytes[self.at : self.at + size]
        self.at += size
        return taken

    def numbers(self, codes: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{codes}", self.take(struct.calcsize(f"<{codes}")))

    def text(self) -> str:
        (length,) = self.numbers("Q")
        return bytes(self.take(length)).decode("utf-8", "replace")

    def key(self) -> Key:
        start, types = self.at, gguf().GGUFValueType
        name, (kind,) = self.text(), self.numbers("I")
        value, item = self.value(kind)
        raw = bytes(self.bytes[start : self.at])
        return Key(name, value, types(kind), None if item is None else types(item), raw)

    def value(self, kind: int) -> tuple[Any, int | None]:
        """Return a value and, of an array, the type of its items."""
        if kind == _STRING:
            return self.text(), None
        if kind != _ARRAY:
            return self.numbers(_SCALARS[kind])[0], None
        item, count = self.numbers("IQ")
        if item in _SCALARS:
            return list(self.numbers(f"{count}{_SCALARS[item]}")), item
        if count > len(self.bytes):
            raise ValueError(f"it states an array of {count} items")
        return [self.value(item)[0] for _ in range(count)], item

    def tensor(self) -> tuple[str, tuple[int, ...], Any, int]:
        """Return the name, shape and type of a tensor, and where it begins after the header [bytes]."""
        name, (dimensions,) = self.text(), self.numbers("I")
        shape = tuple(reversed(self.numbers(f"{dimensions}Q")))
        kind, offset = self.numbers("IQ")
        types = gguf().GGMLQuantizationType
        if kind not in set(types) and kind < 256:
            raise ImportError(f"{name} is of type {kind}, which the package gguf does not know: pip install -U gguf")
        return name, shape, types(kind), offset

    def piece(self, start: int, name: str, shape: tuple[int, ...], kind: Any) -> Piece:
        block, width = map(int, gguf().GGML_QUANT_SIZES[kind])
        stored = (*shape[:-1], shape[-1] // block * width) if shape else (width,)
        size = int(np.prod(stored, dtype=object))
        if start + size > len(self.bytes):
            raise ValueError(f"it ends after {len(self.bytes)} bytes, before the end of its tensor {name}")
        if shape and shape[-1] % block:
            raise ValueError(f"the rows of {name} are {shape[-1]} numbers, and blocks of {kind.name} have {block}")

        def numbers() -> np.ndarray[Any, Any]:
            data = self.data[start : start + size]
            return data.view(_PLAIN[kind.name]).reshape(shape) if kind.name in _PLAIN else data.reshape(stored)

        return Piece(name, shape, kind, numbers)


def _packed_string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _packed(value: Any, kind: int, item: int | None) -> bytes:
    if kind == _STRING:
        return _packed_string(value)
    if kind != _ARRAY:
        return struct.pack(f"<{_SCALARS[kind]}", value)
    if item is None:
        raise ValueError("an array needs the type of its items")
    return struct.pack("<IQ", item, len(value)) + b"".join(_packed(each, item, None) for each in value)


def write_gguf(
    out: str | Path,
    keys: Sequence[Key],
    pieces: Sequence[Piece],
    *,
    alignment: int = 32,
    overwrite: bool = False,
    on_bytes: Callable[[int, int], None] = lambda written, total: None,
) -> Path:
    """Write a GGUF file under a temporary name beside ``out``, tensor after tensor, and rename it.

    Args:
        out: the file, ``*.gguf``.
        keys: all of them, in the order of the file; those that were read from a file are written byte for byte.
        pieces: the tensors, in the order of the file.
        alignment: of every tensor in the file [bytes].
        overwrite: replace a file that exists.
        on_bytes: called with the bytes of tensors that are written so far, and those of all.

    Raises:
        FileExistsError: ``out`` exists, and ``overwrite`` is not set.
        OSError: it cannot be written, or the disk is full; ``out`` is then as it was, and nothing is left beside it.
    """
    out = check_out(out, overwrite=overwrite)
    needed, free = sum(piece.size for piece in pieces), shutil.disk_usage(out.parent).free
    if needed > free:
        raise OSError(f"{out} needs {needed / 2**20:.0f} MiB, and {out.parent} has {free / 2**20:.0f} left")
    with file_in_one_move(out, overwrite=overwrite) as name, name.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", _VERSION, len(pieces), len(keys)))
        for key in keys:
            file.write(key.packed)
        offset = 0
        for piece in pieces:
            shape = struct.pack(f"<I{len(piece.shape)}Q", len(piece.shape), *reversed(piece.shape))
            file.write(_packed_string(piece.name) + shape + struct.pack("<IQ", piece.kind, offset))
            offset += piece.size + -piece.size % alignment
        file.write(b"\0" * (-file.tell() % alignment))
        written = 0
        for piece in pieces:
            data = np.ascontiguousarray(piece.read()).reshape(-1).view(np.uint8).data
            if len(data) != piece.size:
                raise ValueError(f"{piece.name} has {len(data)} bytes, and its shape says {piece.size}")
            for start in range(0, len(data), _STEP):
                written += file.write(data[start : start + _STEP])
                on_bytes(written, needed)
            file.write(b"\0" * (-piece.size % alignment))
        file.flush()
        os.fsync(file.fileno())
    return out


def check_out(out: str | Path, *, overwrite: bool) -> Path:
    """Raise unless a GGUF file can be written there.

    Raises:
        ValueError: a name that does not end in ``.gguf``.
        OSError: a file, a folder or a missing folder is in the way.
    """
    out = Path(out)
    if out.suffix.lower() != ".gguf":
        raise ValueError(f"the output must be a file *.gguf, got {str(out)!r} (export --to hf writes a folder)")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"no folder {out.parent} to write {out.name} into")
    if out.is_dir():
        raise IsADirectoryError(f"{out} is a folder: give the name of a file")
    if out.exists() and not overwrite:
        raise FileExistsError(f"{out} exists: give another name, or allow overwriting (--force)")
    return Path(os.path.realpath(out))
