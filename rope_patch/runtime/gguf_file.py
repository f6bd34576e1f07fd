"""Read and write GGUF files, with errors that name the problem; writing takes one tensor at a time, and then a rename.

Files are read by the package ``gguf``. They are not written by it, so that keys are copied from file to file byte for
byte, whether its writer knows their types or not.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rope_patch.runtime.folders import file_in_one_move
from rope_patch.runtime.gguf_headers import cached_headers, gguf

_VERSION = 3


@dataclass(frozen=True)
class Key:
    """One key of a GGUF file.

    Attributes:
        name: name of the key, such as ``llama.context_length``.
        packed: the bytes of name, type and value in a file.
        read: function that returns the value.
    """

    name: str
    packed: bytes
    read: Callable[[], Any]

    @classmethod
    def of(cls, name: str, value: str | float | list[bool]) -> Key:
        """Return a key for a text, a whole number >= 0, a float or truths, of type STRING, UINT32, FLOAT32 or ARRAY."""
        types = gguf().GGUFValueType
        if isinstance(value, str):
            kind = types.STRING
            packed = _packed(value)
        elif isinstance(value, int):
            kind = types.UINT32
            packed = struct.pack("<I", value)
        elif isinstance(value, list):
            kind = types.ARRAY
            packed = struct.pack("<IQ", types.BOOL, len(value)) + bytes(value)
        else:
            kind = types.FLOAT32
            packed = struct.pack("<f", value)
        return cls(name, _packed(name) + struct.pack("<I", kind) + packed, lambda: value)


@dataclass(frozen=True)
class Piece:
    """One tensor of a file, whose numbers are read only when they are needed.

    Attributes:
        name: name of the tensor in llama.cpp, such as ``blk.0.attn_q.weight``.
        shape: shape of the numbers, rows first, the reverse of ggml's order.
        kind: type of the numbers, a ``gguf.GGMLQuantizationType``.
        read: function that returns the array; of a quantized type it is an array of bytes.
    """

    name: str
    shape: tuple[int, ...]
    kind: Any
    read: Callable[[], np.ndarray[Any, Any]]

    @property
    def size(self) -> int:
        """Size of the tensor in the file [bytes]."""
        # Python's integers, since a damaged shape may be too large for those of numpy.
        block, width = gguf().GGML_QUANT_SIZES[self.kind]
        return int(np.prod(self.shape, dtype=object)) * int(width) // int(block)


@dataclass(frozen=True)
class GGUFFile:
    """An open GGUF file, whose tensors are not loaded.

    Attributes:
        path: path of the file.
        keys: the keys by name, in the order of the file.
        pieces: the tensors, in the order of the file.
        alignment: number of which the place of every tensor is a multiple [bytes].
    """

    path: Path
    keys: Mapping[str, Key]
    pieces: tuple[Piece, ...]
    alignment: int = 32

    def value(self, name: str, default: Any = None) -> Any:
        """Return the value of a key, or ``default`` if the file does not have the key."""
        return self.keys[name].read() if name in self.keys else default

    @property
    def is_quantized(self) -> bool:
        """Whether any tensor is of a quantized type, which stores numbers in blocks."""
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
    """Open a GGUF file, mapped into memory, so that no tensor is loaded.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a GGUF file of this byte order, is cut off, or is a part of a split model.
        ImportError: the package gguf is missing.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    try:
        with cached_headers(path):
            reader = gguf().GGUFReader(path)
    except (ValueError, KeyError, IndexError, MemoryError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"{path} is no GGUF file, truncated or damaged, of the other byte order, or newer than the package gguf "
            f"({error}): copy or download it again, or pip install -U gguf"
        ) from error
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}  # its own
    ends = [*(field.offset for field in fields.values()), reader.end_of_keys][1:]
    keys = {
        name: Key(name, reader.data[field.offset : end].tobytes(), field.contents)
        for (name, field), end in zip(fields.items(), ends, strict=True)
    }
    opened = GGUFFile(path, keys, tuple(map(_piece, reader.tensors)), int(reader.alignment))
    if int(opened.value("split.count", 1)) > 1:
        raise ValueError(f"{path} is one part of a split model: join them with llama-gguf-split --merge")
    return opened


def _piece(tensor: Any) -> Piece:
    shape = tuple(map(int, reversed(tensor.shape)))
    return Piece(tensor.name, shape, tensor.tensor_type, lambda: tensor.data)


def _packed(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def write_gguf(opened: GGUFFile, out: str | Path, *, overwrite: bool = False) -> Path:
    """Write a GGUF file under a temporary name beside ``out``, tensor after tensor, and rename it.

    Args:
        opened: the keys and tensors that are written. Keys that were read from a file are written byte for byte.
        out: the file that is written, ``*.gguf``.
        overwrite: whether to replace a file that exists.

    Raises:
        FileExistsError: ``out`` exists, and ``overwrite`` is not set.
        OSError: the file cannot be written, or the disk is full; ``out`` is then as it was, and nothing is left beside
            it.
    """
    out = check_output_file(out, overwrite=overwrite)
    pieces = opened.pieces
    alignment = opened.alignment
    with file_in_one_move(out) as name, name.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", _VERSION, len(pieces), len(opened.keys)))
        for key in opened.keys.values():
            file.write(key.packed)
        # Offsets of tensors are counted from the end of the header. Each is padded to the alignment.
        offset = 0
        for piece in pieces:
            shape = struct.pack(f"<I{len(piece.shape)}Q", len(piece.shape), *reversed(piece.shape))
            file.write(_packed(piece.name) + shape + struct.pack("<IQ", piece.kind, offset))
            offset += piece.size + -piece.size % alignment
        file.write(b"\0" * (-file.tell() % alignment))
        for piece in pieces:
            data = np.ascontiguousarray(piece.read()).reshape(-1).view(np.uint8).data
            file.write(data)
            file.write(b"\0" * (-piece.size % alignment))
        # On the disk before the rename, which must not put an empty file in place after a power cut.
        file.flush()
        os.fsync(file.fileno())
    return out


def check_output_file(out: str | Path, *, overwrite: bool) -> Path:
    """Return the real path of an output file, after checking that a GGUF file can be written there.

    Raises:
        ValueError: its name does not end in ``.gguf``.
        OSError: a file or folder is in the way, or the folder for it is missing.
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
