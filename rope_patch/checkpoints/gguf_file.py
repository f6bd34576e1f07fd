"""Read and write GGUF files: errors name the problem, and writing takes one tensor at a time and ends in one rename.

The package ``gguf`` reads. It does not write here: what is copied from file to file are the very bytes of a key, of a
kind that its writer knows or not.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rope_patch.checkpoints.gguf_header_cache import cached_headers, gguf
from rope_patch.runtime.folders import file_in_one_move

_VERSION = 3
_STEP = 1 << 24
"""Bytes that are written at once, so that progress shows and Ctrl-C is heard within a large tensor."""


@dataclass(frozen=True)
class Key:
    """One key of a GGUF file.

    Attributes:
        name: ``llama.context_length``.
        packed: its bytes in a file: name, type and value.
        read: returns the value.
    """

    name: str
    packed: bytes
    read: Callable[[], Any]

    @classmethod
    def of(cls, name: str, value: str | float) -> Key:
        """Make a key of a text, a whole number >= 0 or a float, as STRING, UINT32 or FLOAT32."""
        types = gguf().GGUFValueType
        if isinstance(value, str):
            kind, packed = types.STRING, _packed(value)
        elif isinstance(value, int):
            kind, packed = types.UINT32, struct.pack("<I", value)
        else:
            kind, packed = types.FLOAT32, struct.pack("<f", value)
        return cls(name, _packed(name) + struct.pack("<I", kind) + packed, lambda: value)


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
        return self.keys[name].read() if name in self.keys else default

    @property
    def is_quantized(self) -> bool:
        """Whether any tensor holds blocks of numbers, and not one number after the other."""
        return any(gguf().GGML_QUANT_SIZES[piece.kind][0] > 1 for piece in self.pieces)

    @property
    def weights(self) -> str:
        """The type of the weights: what the file calls itself (``Q4_K_M``), and what most of them are if not that."""
        sizes: Counter[str] = Counter()
        for piece in self.pieces:
            sizes[piece.kind.name] += piece.size
        most = max(sizes, key=sizes.__getitem__, default="no")
        stated = {kind.value: kind.name.partition("_")[2] for kind in gguf().LlamaFileType}
        name = stated.get(self.value("general.file_type"), "")
        if not name or name.startswith(most):
            return name or most
        return f"{name} (mostly {most})"


def open_gguf(path: str | Path) -> GGUFFile:
    """Open a GGUF file, mapped into memory: no tensor is loaded.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no GGUF file, one that is cut off, a part of a split one, or one of the other byte order.
        ImportError: the package gguf is missing.
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
    try:
        with cached_headers(path):
            reader = gguf().GGUFReader(path)
    except (ValueError, KeyError, IndexError, MemoryError, OverflowError, struct.error) as error:
        raise ValueError(
            f"{path} is a truncated or damaged GGUF file, or newer than the package gguf ({error}): copy or download "
            "it again, or pip install -U gguf"
        ) from error
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}  # its own
    ends = [*(field.offset for field in fields.values()), reader.end_of_keys][1:]
    keys = {
        name: Key(name, reader.data[field.offset : end].tobytes(), field.contents)
        for (name, field), end in zip(fields.items(), ends, strict=True)
    }
    opened = GGUFFile(keys, tuple(map(_piece, reader.tensors)), int(reader.alignment))
    if int(opened.value("split.count", 1)) > 1:
        raise ValueError(f"{path} is one part of a split model: join them with llama-gguf-split --merge")
    return opened


def _piece(tensor: Any) -> Piece:
    shape = tuple(map(int, reversed(tensor.shape)))
    return Piece(tensor.name, shape, tensor.tensor_type, lambda: tensor.data)


def _packed(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


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
    out = check_output_file(out, overwrite=overwrite)
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
            file.write(_packed(piece.name) + shape + struct.pack("<IQ", piece.kind, offset))
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


def check_output_file(out: str | Path, *, overwrite: bool) -> Path:
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
