"""The registry of methods: those of this package, of a user's script, and of installed packages."""

from __future__ import annotations

import contextlib
import importlib.metadata
import threading
import warnings
from collections.abc import Iterator, MutableMapping
from typing import TypeVar

from rope_patch.errors import in_one_line

GROUP = "rope_patch.methods"
"""The group of entry points by which an installed package offers methods."""

Class = TypeVar("Class")


class Registry(MutableMapping[str, type[Class]]):
    """Classes by name, in the order of their definition; those that installed packages offer come last.

    A package offers a method by an entry point, in its ``pyproject.toml``::

        [project.entry-points."rope_patch.methods"]
        my_method = "my_package.methods"

    The value names a module that defines method classes, or one such class. Entry points are read the first time that
    the registry is listed or asked for a name it does not know. One that cannot be loaded warns with the package it
    comes from, and leaves all other methods as they are.
    """

    def __init__(self) -> None:
        self._classes: dict[str, type[Class]] = {}
        self._lock = threading.RLock()
        self._complete = False
        self.broken: dict[str, str] = {}
        """By the name of an entry point that could not be loaded: the package it comes from, and the reason."""

    def __getitem__(self, name: str) -> type[Class]:
        if name not in self._classes:
            self._read_entry_points()
        return self._classes[name]

    def __setitem__(self, name: str, cls: type[Class]) -> None:
        self._classes[name] = cls

    def __delitem__(self, name: str) -> None:
        del self._classes[name]

    def __iter__(self) -> Iterator[str]:
        self._read_entry_points()
        return iter(self._classes)

    def __len__(self) -> int:
        self._read_entry_points()
        return len(self._classes)

    def defined(self, name: str) -> type[Class] | None:
        """Return a class that is defined in this process; entry points are not read."""
        return self._classes.get(name)

    @contextlib.contextmanager
    def kept_on_error(self) -> Iterator[None]:
        """Leave the registry as it was where the block raises."""
        self._read_entry_points()  # which stay
        before = dict(self._classes)
        try:
            yield
        except BaseException:
            self._classes.clear()
            self._classes.update(before)
            raise

    def _read_entry_points(self) -> None:
        if self._complete:
            return
        with self._lock:  # held by the thread that reads them; a method that they define may ask the registry
            if self._complete:
                return
            self._complete = True
            for entry in importlib.metadata.entry_points(group=GROUP):
                self._load(entry)

    def _load(self, entry: importlib.metadata.EntryPoint) -> None:
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an installed package"
        try:
            with self.kept_on_error():
                before = set(self._classes)
                loaded = entry.load()
                if not (set(self._classes) - before or self._holds(loaded)):
                    raise ValueError(
                        "it defines no method: it must name a subclass of rope_patch.Method, or its module"
                    )
        except Exception as error:  # of whatever kind the package raises
            reason = str(error) if type(error) is ValueError else in_one_line(error)
            self.broken[entry.name] = f"{package} (entry point {entry.value}): {reason}"
            warnings.warn(
                f"the method {entry.name!r} is missing: it cannot be loaded from {self.broken[entry.name]}. "
                "Update or uninstall that package",
                stacklevel=5,
            )

    def _holds(self, loaded: object) -> bool:
        """Tell whether a class, or a class in a module, is registered, and is not one that this package defines."""
        own = [cls for cls in self._classes.values() if not is_built_in(cls)]
        return any(cls is loaded or cls in getattr(loaded, "__dict__", {}).values() for cls in own)


def is_built_in(cls: type) -> bool:
    """Tell whether a class is one that this package defines."""
    return cls.__module__.startswith("rope_patch.")
