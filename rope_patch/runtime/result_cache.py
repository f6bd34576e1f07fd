"""Finished work, kept on disk, so that a crash or Ctrl-C loses none of it."""

from __future__ import annotations

import functools
import glob
import hashlib
import inspect
import json
import math
import os
import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

from rope_patch.runtime.parallel import from_first_process, processes

# What each line of a result cache begins with: `json.dumps` writes keys in the order of the dictionary. By it a line
# that was cut short is told from the line of some other file.
LINE_START = b'{"key"'

LIBRARIES = sys.stdlib_module_names | {"bitsandbytes", "peft", "rope_patch", "torch", "transformers"}
"""The packages whose code has no identity: see :func:`code_identity`."""


class ResultCache(MutableMapping[str, Any]):
    r"""A dictionary of JSON values in a file of lines, each written and synced before the next piece of work begins.

    Keys come from :func:`key`: they name everything a value depends on, so one file may serve any number of models
    and settings, and a changed setting is measured anew. A line cut short by a crash is dropped.

    Args:
        path: the file that holds the values; it is created when the first value is set.

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
                # A line that was cut short is dropped: its beginning, or the zeros that a loss of power leaves.
                if not line.startswith(LINE_START) and not LINE_START.startswith(line) and line.strip(b"\0"):
                    raise ValueError(
                        f"{self.path}, line {number}, is not a line of a result cache: remove the file, or give another"
                    ) from None

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        line = json.dumps({"key": name, "value": value}, allow_nan=False).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b", buffering=0) as file:
            # A line that a crash cut short has no line break behind it: the next one then begins with one.
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    line = b"\n" + line
            file.write(line)  # in one call: another process may write here too
            os.fsync(file.fileno())
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        raise TypeError("finished work is not deleted: remove the file")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class PartOfCache(ResultCache):
    """The result cache of all processes; this process writes what it alone has finished, to a file of its own.

    Args:
        path: the file of this process.
        values: the values that all processes have finished already, by key.
    """

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        super().__init__(path)
        self._values.update(values)

    def __setitem__(self, name: str, value: Any) -> None:
        self._values[name] = value  # the first process has it too, and writes it

    def finish(self, values: dict[str, Any]) -> None:
        """Write what this process alone has finished."""
        for name, value in values.items():
            super().__setitem__(name, value)

    def merged(self) -> None:
        """Delete the file of this process: the first one has written its contents to the common file."""
        self.path.unlink(missing_ok=True)


def open_cache(resume: str | Path | MutableMapping[str, Any] | None) -> MutableMapping[str, Any] | None:
    """Return the result cache that ``resume`` names, with the same contents in all processes.

    Each process appends what it finishes to a file of its own: the first one to the file that is named, the others to
    one beside it, which is merged into the first after each measurement, or after a crash by the next run.

    Raises:
        ValueError: a file that is no result cache.
    """
    if not isinstance(resume, str | Path):
        return resume
    path = Path(resume)
    rank, _ = processes()
    values = from_first_process(lambda: _merge_parts(path))  # one process alone may go on where several were stopped
    if rank:
        return PartOfCache(path.with_name(f"{path.name}.rank{rank}"), values)
    return ResultCache(path)


def _merge_parts(path: Path) -> dict[str, Any]:
    """Bring what other processes finished before a crash into one file, and return all that is finished."""
    cache = ResultCache(path)
    # Without escaping, a name with brackets would be a pattern.
    for part in path.parent.glob(f"{glob.escape(path.name)}.rank*"):
        add_new(cache, dict(ResultCache(part)))
        part.unlink()
    return dict(cache)


def add_new(cache: MutableMapping[str, Any], values: dict[str, Any]) -> None:
    """Put values into a result cache whose names it does not hold yet."""
    for name, value in values.items():
        if name not in cache:
            cache[name] = value


def key(**parts: Any) -> str:
    """Return a short key of everything that determines a result.

    Example:
        >>> key(a=1, b="x") == key(b="x", a=1) != key(a=2, b="x")
        True
    """
    # Paths, dtypes and the like are not JSON; their text tells them apart.
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def code_identity(*classes: type) -> str:
    """Return a text that changes with the code of classes; "" if all of them are of :data:`LIBRARIES`.

    It covers the whole files that define them and their bases, but no others that these import. A class that stands in
    no file, as in a notebook, is hashed with all values that it uses.

    Args:
        *classes: the classes that take part in a result, such as those of the entries of registries.

    Raises:
        ImportError: a class stands in no file, and the package datasets is missing.

    Example:
        >>> code_identity(dict, MutableMapping)
        ''
    """
    codes = set()
    for part in {part for one in classes for part in one.__mro__}:
        if part.__module__.partition(".")[0] not in LIBRARIES:
            try:
                codes.add(_source(part))
            except (OSError, TypeError):  # it stands in no file
                codes.add(hash_with_values(part))
    return " ".join(sorted(codes))


# Read once: the code that was imported runs, whatever its file holds by now. Imported again, it is another class.
@functools.cache
def _source(of: type) -> str:
    return key(source=inspect.findsource(of)[0])  # all lines of the file, if the class is in it


def hash_with_values(used: Any) -> str:
    """Return a digest of an object and of the values that it holds or uses.

    Raises:
        ImportError: the package datasets is missing.
    """
    try:
        from datasets.fingerprint import Hasher  # takes half a second to import
    except ImportError:
        raise ImportError(
            f"the package datasets tells results of {used!r} from those of other code: pip install datasets, or do "
            "without it"
        ) from None
    return str(Hasher.hash(used))


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
