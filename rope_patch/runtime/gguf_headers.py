"""Let the package ``gguf`` read the header of a file only once, and fast, however often transformers asks for it.

Transformers makes a ``gguf.GGUFReader`` for the config, another for the weights and others for the tokenizer. Each of
them slices a memory map of numpy for every token, score and type of the vocabulary: ten seconds for the 262,144 tokens
of Gemma 3. Here the header is read once, from the buffer of the mapped file, which takes two seconds.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rope_patch.runtime.folders import is_gguf

_ALONE = threading.RLock()
"""A lock that is held while the reader is replaced, since the package has one reader for all threads."""


def gguf() -> Any:
    """Return the ``gguf`` package, which is not always installed."""
    import gguf as package

    return package


@contextlib.contextmanager
def cached_headers(source: str | Path) -> Iterator[None]:
    """Replace the reader of the package ``gguf``, within a ``with`` block, by one that keeps the headers it has read.

    It gives the same fields and tensors, so another thread may use it, too. A block inside another one uses the headers
    that the outer one has read; a block in another thread waits until the first one ends.

    Args:
        source: the model that is loaded in the block. If it is not a GGUF file, nothing is replaced.

    Raises:
        ImportError: it is a GGUF file, and the package gguf is missing.
    """
    if not is_gguf(source):
        yield
        return
    package = gguf()
    with _ALONE:
        original = package.GGUFReader
        if not hasattr(original, "headers"):
            package.GGUFReader = _keeping(original)
        try:
            yield
        finally:
            package.GGUFReader = original


def _keeping(original: Any) -> Any:
    """Return a class that is derived from the reader of the package and keeps the headers it has read.

    It takes numbers from the buffer of the mapped file, because slices of a ``numpy.memmap`` cost several times as
    much. Reading beyond the end of the file is an error in it, while the package would read nothing there, as often as
    a damaged count says; so ends a file in the other byte order.

    Args:
        original: the reader of the package ``gguf``.
    """

    class KeepingReader(original):  # type: ignore[misc]
        headers: ClassVar[dict[Any, dict[str, Any]]] = {}

        def __init__(self, path: Any, mode: str = "r") -> None:
            state = os.stat(path)
            # A file that was written again since is another file.
            file = (os.path.realpath(path), mode, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
            if file not in self.headers:
                super().__init__(path, mode)
                self.headers[file] = self.__dict__
            self.__dict__ = dict(self.headers[file])

        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            return np.frombuffer(self.data, dtype, int(count), int(offset))

        def _build_fields(self, offs: int, count: int) -> int:
            self.end_of_keys = super()._build_fields(offs, count)
            return int(self.end_of_keys)

    return KeepingReader
