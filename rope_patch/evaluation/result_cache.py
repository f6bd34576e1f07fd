"""Finished work, kept on disk, so that a crash or Ctrl-C loses none of it."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

START = b'{"key"'


class ResultCache(MutableMapping[str, Any]):
    r"""A dictionary of JSON values in a file of lines, each written and synced before the next piece of work begins.

    Keys come from :func:`key`: they name everything a value depends on, so one file may serve any number of models
    and settings, and a changed setting is measured anew. A line cut short by a crash is dropped.

    Args:
        path: of the file; made when the first value is set.

    Raises:
        ValueError: the file exists and holds something else.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "work.jsonl")
        ...     ResultCache(path)["a"] = 1.5
        ...     _ = path.write_text(path.read_text() + '{"key": "b", "val')  # the machine stopped here
        ...     dict(ResultCache(path))
        {'a': 1.5}
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._values: dict[str, Any] = {}
        if not self.path.exists():
            return
        for number, line in enumerate(self.path.read_bytes().split(b"\n"), 1):
            try:
                if line:
                    entry = json.loads(line)
                    self._values[entry["key"]] = entry["value"]
            except (ValueError, TypeError, KeyError):
                # One that was cut short is dropped: its beginning, or the zeros of a file system that lost power.
                if not line.startswith(START) and not START.startswith(line) and line.strip(b"\0"):
                    raise ValueError(
                        f"{self.path}, line {number}, is not a line of a result cache: remove the file, or give another"
                    ) from None

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        line = json.dumps({"key": name, "value": value}, allow_nan=False).encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b", buffering=0) as file:
            whole = file.tell() == 0
            if not whole:
                file.seek(-1, os.SEEK_END)
                whole = file.read(1) == b"\n"
            file.write((b"" if whole else b"\n") + line + b"\n")  # at once: another process may write here too
            os.fsync(file.fileno())
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        raise TypeError("finished work is not deleted: remove the file")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def key(**parts: Any) -> str:
    """Return a short key of everything that determines a result.

    Example:
        >>> key(a=1, b="x") == key(b="x", a=1) != key(a=2, b="x")
        True
    """
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def finite(value: Any) -> Any:
    """Return a value as JSON can say it: numbers that are infinite or none become None, tuples lists.

    Example:
        >>> finite({"a": (1.5, float("inf"))})
        {'a': [1.5, None]}
    """
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
