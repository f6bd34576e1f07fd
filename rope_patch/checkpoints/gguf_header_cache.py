"""Have the package ``gguf`` read a file's header once, and fast, however often transformers asks for it.

Transformers makes a ``gguf.GGUFReader`` for the config, another for the weights and others for the tokenizer. Each of
them slices a memory map of numpy for every token, score and type of the vocabulary: ten seconds for the 262,144 tokens
of Gemma 3. Here the header is read once, and of an array only where its elements begin, which takes 0.1 seconds.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rope_patch.runtime.folders import is_gguf

_ALONE = threading.RLock()
"""Held while the reader is replaced: the package has one for all threads."""


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


@contextlib.contextmanager
def cached_headers(source: str | Path) -> Iterator[None]:
    """Replace the reader of the package ``gguf`` in this block by one that keeps the headers it has read.

    It gives the same fields and tensors, so it may serve another thread, too. A block within another one uses what that
    one has read; in another thread it waits until the first one ends.

    Args:
        source: of what is loaded in the block; nothing is replaced where it is no GGUF file.

    Raises:
        ImportError: it is one, and the package gguf is missing.
    """
    if not is_gguf(source):
        yield
        return
    package = gguf()
    with _ALONE:
        original = package.GGUFReader
        package.GGUFReader = original if hasattr(original, "headers") else _keeping(original)
        try:
            yield
        finally:
            package.GGUFReader = original


class _Elements(Sequence[Any]):
    """The elements of an array in a file, each of which becomes an array of numpy when it is asked for."""

    def __init__(self, count: int, element: Callable[[int], Any]) -> None:
        self.count, self.element = count, element

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        return self.element(index)


def _keeping(original: Any) -> Any:
    """Return a class derived from the reader of the package, with headers of its own to keep.

    It takes numbers out of the buffer of the mapped file: slices of a ``numpy.memmap`` cost several times as much. And
    reading beyond the end of the file is an error; the package would read nothing there, as often as a damaged count
    says. The other byte order, which :func:`~rope_patch.checkpoints.gguf_file.open_gguf` refuses, is not read. An array
    of arrays, which llama.cpp refuses, has no elements here.
    """

    class KeepingReader(original):  # type: ignore[misc]
        headers: ClassVar[dict[Any, dict[str, Any]]] = {}
        data = property(lambda self: self._data, lambda self, mapped: setattr(self, "_data", np.asarray(mapped)))

        def __init__(self, path: Any, mode: str = "r") -> None:
            state = os.stat(path)
            file = (os.path.realpath(path), mode, state.st_ino, state.st_size, state.st_mtime_ns)
            if file not in self.headers:
                super().__init__(path, mode)
                self.headers[file] = self.__dict__
            self.__dict__ = dict(self.headers[file])

        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            return np.frombuffer(self._data, dtype, int(count), int(offset))

        def _build_fields(self, offs: int, count: int) -> int:
            self.end_of_keys = super()._build_fields(offs, count)
            return int(self.end_of_keys)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            types = gguf().GGUFValueType
            if raw_type != types.ARRAY or self._get(orig_offs, np.uint32)[0] == types.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind, count = types(self._get(orig_offs, np.uint32)[0]), int(self._get(orig_offs + 4, np.uint64)[0])
            first = orig_offs + 12
            if kind == types.STRING:
                starts = _starts(self._data.data, first, count)
                end = starts[-1]
                elements = _Elements(count, lambda i: self._data[starts[i] + 8 : starts[i + 1]])
            else:
                numbers = self._get(first, self.gguf_scalar_to_np[kind], count)
                end = first + numbers.nbytes
                elements = _Elements(count, lambda i: numbers[i : i + 1])
            return end - orig_offs, [elements], [], [types.ARRAY, *[kind] * bool(count)]

        def _push_field(self, field: Any, skip_sum: bool = False) -> int:
            if len(field.parts) == 4 and isinstance(field.parts[3], _Elements):  # after its name and type
                field = field._replace(parts=field.parts[3], data=range(len(field.parts[3])))
            return int(super()._push_field(field, skip_sum))

    return KeepingReader


def _starts(data: memoryview, offset: int, count: int) -> list[int]:
    """Return where each string of an array begins in a file, and where the last one ends [bytes].

    Raises:
        ValueError: an array that is longer than the file.
    """
    starts, length = [offset], struct.Struct("<Q").unpack_from
    try:
        for _ in range(count):
            offset += 8 + length(data, offset)[0]
            starts.append(offset)
    except struct.error as error:
        raise ValueError("an array ends beyond the end of the file") from error
    if offset > len(data):
        raise ValueError("an array ends beyond the end of the file")
    return starts
