"""Import the modules in which users define methods of their own."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from rope_patch.errors import in_one_line
from rope_patch.methods.base import METHODS
from rope_patch.methods.registry import is_built_in


@dataclass(frozen=True)
class Definable:
    """A kind of thing that users define in modules of their own.

    Attributes:
        noun: what one is called.
        form: how one is defined, for an error.
        registry: returns the registry that it enters, of classes or of objects by name.
    """

    noun: str
    form: str
    registry: Callable[[], MutableMapping[str, Any]]

    def of_users(self) -> dict[str, Any]:
        """Return what is registered and is not of this package."""
        return {name: entry for name, entry in self.registry().items() if not is_built_in(_class_of(entry))}

    @contextlib.contextmanager
    def kept_on_error(self) -> Iterator[Mapping[str, Any]]:
        """Forget what the block registers if it raises; gives what users had registered before it."""
        before, everything = self.of_users(), dict(self.registry())
        try:
            yield before
        except BaseException:
            registry = self.registry()
            for name in self.of_users().keys() - before.keys():
                del registry[name]
            registry.update(everything)
            raise


METHOD = Definable("method", "class MyMethod(rope_patch.Method, name='my_method')", lambda: METHODS)


def import_methods(names: Sequence[str], kinds: Sequence[Definable] = (METHOD,)) -> None:
    """Import modules that define methods, so that their names can be used.

    Modules of the current directory are found, as with ``python -m``; it stays on the path after that, as its last
    entry, so that no file in it takes the place of an installed package later on.

    Args:
        names: dotted names of modules: ``["my_methods", "my_package.methods"]``.
        kinds: what a module may define, and needs at least one of. The command line takes retrieval tasks and metrics,
            too: :func:`rope_patch.evaluation.importing.import_modules`.

    Raises:
        ValueError: a module that is not found, fails at import, or defines nothing of these kinds, or a method whose
            name is taken. What it defined up to then is forgotten.
    """
    directory = os.getcwd()
    sys.path.insert(0, directory)
    try:
        importlib.invalidate_caches()
        for name in names:
            with contextlib.ExitStack() as stack:
                before = [stack.enter_context(kind.kept_on_error()) for kind in kinds]
                _import(name, kinds, before)
    finally:
        sys.path.remove(directory)
        if directory not in sys.path:
            sys.path.append(directory)


def _import(name: str, kinds: Sequence[Definable], before: Sequence[Mapping[str, Any]]) -> None:
    if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"a module to import is given by its dotted name, such as my_methods, got {name!r}")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):  # what the module itself imports
            raise ValueError(f"the module {name!r} fails at import: {in_one_line(error)}") from error
        raise ValueError(
            f"found no module {error.name!r} to import: give the dotted name of a Python file in "
            f"{os.getcwd()}, or of an installed package"
        ) from error
    except Exception as error:  # of whatever kind a user's code raises
        reason = str(error) if type(error) is ValueError else in_one_line(error)
        raise ValueError(f"the module {name!r} fails at import: {reason}") from error
    for kind, known in zip(kinds, before, strict=True):
        for key, entry in kind.of_users().items():
            if entry is not known.get(key) or _class_of(entry) in vars(module).values():
                return
    nouns, (*forms, last) = " and no ".join(kind.noun for kind in kinds), [kind.form for kind in kinds]
    needed = f"{', '.join(forms)}, or {last}" if forms else last
    raise ValueError(f"the module {name!r} defines no {nouns}: it needs {needed}")


def _class_of(entry: Any) -> type:
    return entry if isinstance(entry, type) else type(entry)
