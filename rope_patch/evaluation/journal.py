"""Finished work, kept on disk, so that a crash or Ctrl-C loses none of it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any


class Journal(MutableMapping[str, Any]):
    r"""A dictionary of JSON values in a file of lines, each written and synced before the next piece of work begins.

    Keys come from :func:`key`: they name everything a value depends on, so one file may serve any number of models
    and settings, and a changed setting is measured anew. A line cut short by a crash is dropped.

    Args:
        path: of the file; made when the first value is set.

    Raises:
        ValueError: the file exists and is no journal.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "work.jsonl")
        ...     Journal(path)["a"] = 1.5
        ...     _ = path.write_text(path.read_text() + '{"key": "b", "val')  # the machine stopped here
        ...     dict(Journal(path))
        {'a': 1.5}
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._values: dict[str, Any] = {}
        if not self.path.exists():
            return
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                entry = json.loads(line)
                self._values[entry["key"]] = entry["value"]
            except (ValueError, TypeError, KeyError):
                raise ValueError(f"{self.path}, line {number}, is not a line of kept work: give another file") from None
        if whole < len(data):
            if whole == 0 and not data.startswith(b'{"key"'):
                raise ValueError(f"{self.path} is not a file of kept work: give another file")
            with self.path.open("r+b") as file:
                file.truncate(whole)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        line = json.dumps({"key": name, "value": value}, allow_nan=False)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        raise TypeError("kept work is not deleted: remove the file")

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
