"""Finished work, kept on disk, so that a crash or Ctrl-C loses none of it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from collections import UserDict
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from rope_patch.runtime.parallel import from_first_process

RESULT_CACHE = "finished.jsonl"
"""Name of the file of finished work in the output folder; the same command reads it when it is run again."""

# What each line of a result cache begins with: `json.dumps` writes keys in the order of the dictionary. By it a line
# that was cut short is told from the line of some other file.
LINE_START = b'{"key"'


class ResultCache(UserDict[str, Any]):
    r"""A dictionary of JSON values in a file of lines, each written and synced before the next piece of work begins.

    Keys come from :func:`key`: they name everything a value depends on, so one file may serve any number of models
    and settings, and a changed setting is measured anew. Several processes may add lines to one file. A line cut short
    by a crash is dropped.

    Args:
        path: the file that holds the values; it is created when the first value is set.
        values: the values that the file holds, where they are known already.

    Raises:
        ValueError: the file exists and holds something else, or a value was changed after it was written.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "work.jsonl")
        ...     ResultCache(path)["a"] = 1.5
        ...     _ = path.write_text(path.read_text() + '{"key": "b", "val')  # the machine stopped here
        ...     dict(ResultCache(path))
        {'a': 1.5}
    """

    def __init__(self, path: str | Path, values: dict[str, Any] | None = None) -> None:
        self.path = Path(path)
        self.data = _values_in(self.path) if values is None else values  # not through update, which would write them

    def __setitem__(self, name: str, value: Any) -> None:
        entry = {"key": name, "value": value, "checksum": _checksum(name, value)}
        line = json.dumps(entry, allow_nan=False).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b", buffering=0) as file:
            # A line that a crash cut short has no line break behind it: the next one then begins with one.
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    line = b"\n" + line
            file.write(line)  # in one call: another process may write here too
            os.fsync(file.fileno())
        self.data[name] = value


def _values_in(path: Path) -> dict[str, Any]:
    """Return the values of a file, without lines that were cut short; none if there is no file yet."""
    values: dict[str, Any] = {}
    if not path.exists():
        return values
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line:
            continue
        try:
            entry = json.loads(line)
            name, value = entry["key"], entry["value"]
            whole = "checksum" not in entry or entry["checksum"] == _checksum(name, value)
        except (ValueError, TypeError, KeyError, RecursionError):
            # A line that was cut short is dropped: its beginning, or the zeros that a loss of power leaves.
            cut_short = line.startswith(LINE_START) or LINE_START.startswith(line) or not line.strip(b"\0")
            if not values and not cut_short:
                raise ValueError(f"{path} is not a result cache: remove the file, or give another") from None
            continue
        if not whole:
            raise ValueError(f"{path}, line {number}: the value was changed after it was written: delete this line")
        values[name] = value
    return values


def _checksum(name: str, value: Any) -> int:
    """Return a number that tells a key and its value from others, also after they were read back."""
    return zlib.crc32(json.dumps([name, value]).encode())


def open_cache(resume: str | Path | MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Return the result cache that ``resume`` names, with the same contents in all processes.

    Raises:
        ValueError: a file that is no result cache.
    """
    if not isinstance(resume, str | Path):
        return resume
    path = Path(resume)
    # Read by one process: another one may have added lines when the next opens the file.
    return ResultCache(path, from_first_process(lambda: _values_in(path)))


def key(**parts: Any) -> str:
    """Return a short key of everything that determines a result.

    Example:
        >>> key(a=1, b="x") == key(b="x", a=1) != key(a=2, b="x")
        True
    """
    # Paths, dtypes and the like are not JSON; their text tells them apart.
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def finite(value: Any) -> Any:
    """Return a value that JSON can hold: infinite numbers and NaN become None, tuples become lists.

    Example:
        >>> finite({"a": (1.5, float("inf"))})
        {'a': [1.5, None]}
    """
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
