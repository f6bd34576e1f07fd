"""What can be added by name: methods, retrieval tasks, metrics and cache formats.

Each kind has a base class whose subclasses enter themselves: ``class MyMethod(Method, name="my_method")``. They may
stand in this package, in a user's script, in a module that ``--import`` names, or in an installed package, which names
the module as an entry point::

    [project.entry-points."rope_patch.methods"]
    my_method = "my_package.methods"
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import warnings
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from rope_patch.runtime.errors import in_one_line
from rope_patch.runtime.text import did_you_mean

Entry = TypeVar("Entry")


class Registry(UserDict[str, Entry]):
    """Entries by name, in the order of their definition; those that installed packages offer come last.

    Entry points are read the first time that the registry is listed or asked for a name that it does not hold, so that
    nobody waits for packages that are not needed. One that cannot be loaded is warned about.

    Args:
        noun: the word for an entry in messages, such as ``"method"``.
        group: the group of entry points by which installed packages offer entries.
        needs: the attributes and methods that every entry must define.
    """

    def __init__(self, noun: str, group: str, needs: Sequence[str] = ()) -> None:
        super().__init__()
        self.noun = noun
        self.group = group
        self.needs = needs
        self.broken: dict[str, str] = {}
        """By the name of an entry point that could not be loaded: a sentence with the package and the reason."""
        self._has_loaded_packages = False
        self._of_file: Callable[[str], Entry] | None = None
        self._ending = ""

    def from_files(self, ending: str, make: Callable[[str], Entry]) -> None:
        """Let the path of a file be a name.

        Args:
            ending: the ending of such paths.
            make: the function that returns the entry of a path.
        """
        self._ending = ending
        self._of_file = make

    def __contains__(self, name: object) -> bool:
        if name not in self.data:
            self._load_packages()
        return name in self.data or self._is_file(name)

    # UserDict asks this for a name that is not in `data`.
    def __missing__(self, name: str) -> Entry:
        self._load_packages()
        if self._of_file is not None and self._is_file(name):
            return self._of_file(name)
        return self.data[name]

    def _is_file(self, name: object) -> bool:
        return self._is_path(name) and os.path.isfile(os.path.expanduser(str(name)))

    def _is_path(self, name: object) -> bool:
        return self._of_file is not None and isinstance(name, str) and name.endswith(self._ending)

    def __iter__(self) -> Iterator[str]:
        self._load_packages()
        return iter(self.data)

    def __len__(self) -> int:
        self._load_packages()
        return len(self.data)

    def add(self, name: str, entry: Entry) -> None:
        """Enter something under a name.

        Raises:
            ValueError: the name is taken by another class, or the entry lacks what it needs.
        """
        lacking = [need for need in self.needs if not _defines(entry, need)]
        if lacking:
            raise ValueError(f"the {self.noun} {name!r} must define {' and '.join(lacking)}")
        if (known := self.data.get(name)) is not None:
            ours = _class_of(entry)
            theirs = _class_of(known)
            # A notebook's cell that is run again defines a class of the same name anew, which replaces the earlier one.
            if ours.__qualname__ != theirs.__qualname__ or (is_built_in(known) and not is_built_in(entry)):
                raise ValueError(
                    f"the {self.noun} name {name!r} is taken by {theirs.__qualname__} of {theirs.__module__}: give "
                    f"{ours.__qualname__} another name"
                )
        self.data[name] = entry

    def find(self, name: str, groups: Iterable[str] = ()) -> Entry:
        """Return the entry of a name that a user gave.

        Args:
            name: the name.
            groups: names that stand for several entries, which the error lists, too.

        Raises:
            ValueError: there is none; the known names are listed.
            FileNotFoundError: the name is the path of a file that does not exist.
        """
        if name in self:
            return self[name]
        if name in self.broken:
            raise ValueError(self.broken[name])
        if self._is_path(name):
            raise FileNotFoundError(f"found no file {name}")
        known = [*self, *groups]
        raise ValueError(f"unknown {self.noun} {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}")

    def _load_packages(self) -> None:
        if self._has_loaded_packages:
            return
        self._has_loaded_packages = True  # set first: modules loaded here may ask the registry themselves
        for entry in importlib.metadata.entry_points(group=self.group):
            try:
                entry.load()
            except (Exception, SystemExit) as error:  # a package may raise anything
                package = "a package"
                if entry.dist is not None:
                    package = f"{entry.dist.name} {entry.dist.version}"
                self.broken[entry.name] = (
                    f"the {self.noun} {entry.name!r} cannot be loaded from {package} (entry point {entry.value}): "
                    f"{in_one_line(error)}. Update or uninstall that package"
                )
                warnings.warn(self.broken[entry.name], stacklevel=4)


def import_modules(names: Sequence[str]) -> None:
    """Import modules that define methods, retrieval tasks, metrics or cache formats, so that their names can be used.

    Modules of the current directory are found, as with ``python -m``; it stays on the path after that, as its last
    entry, so that no file in it takes the place of an installed package later on.

    Args:
        names: the dotted names of modules: ``["my_methods", "my_package.methods"]``.

    Raises:
        ValueError: a module cannot be imported.
    """
    directory = os.getcwd()
    sys.path.insert(0, directory)
    try:
        # Python remembers which files a folder holds, and would miss a module written since this process began.
        importlib.invalidate_caches()
        for name in names:
            if name not in sys.modules:
                _import(name)
    finally:
        sys.path.remove(directory)
        if directory not in sys.path:
            sys.path.append(directory)


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        # The module itself is missing, or the package that it would lie in; not one that it imports.
        missing = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
        if missing or name.startswith("."):
            raise ValueError(
                f"found no module {name!r}: give the dotted name, such as my_methods, of a Python file in "
                f"{os.getcwd()} or of an installed package"
            ) from error
        raise ValueError(f"the module {name!r} fails at import: {in_one_line(error)}") from error


def _defines(entry: Any, name: str) -> bool:
    value = getattr(entry, name, None)
    # Asked of the attribute, since a class that is being made does not know its abstract methods yet.
    return value is not None and not getattr(value, "__isabstractmethod__", False)


def is_built_in(entry: Any) -> bool:
    """Tell whether a class, or the class of an object, is one that this package defines."""
    return _class_of(entry).__module__.startswith("rope_patch.")


def _class_of(entry: Any) -> type:
    return entry if isinstance(entry, type) else type(entry)
