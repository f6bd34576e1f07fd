"""Import the modules in which users define methods of their own."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from rope_patch.errors import in_one_line
from rope_patch.methods.base import METHODS
from rope_patch.methods.registry import is_built_in


def import_methods(names: Sequence[str]) -> None:
    """Import modules that define methods, so that their names can be used.

    Modules of the current directory are found, as with ``python -m``; it stays on the path after that, as its last
    entry, so that no file in it takes the place of an installed package later on.

    Args:
        names: dotted names of modules: ``["my_methods", "my_package.methods"]``.

    Raises:
        ValueError: a module that is not found, fails at import, or defines no method, or a method whose name is taken.
            What it defined up to then is forgotten.
    """
    directory = os.getcwd()
    sys.path.insert(0, directory)
    try:
        importlib.invalidate_caches()
        for name in names:
            with METHODS.kept_on_error():
                _import(name)
    finally:
        sys.path.remove(directory)
        if directory not in sys.path:
            sys.path.append(directory)


def _import(name: str) -> None:
    if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"a module of methods is given by its dotted name, such as my_methods, got {name!r}")
    before = {known: METHODS.defined(known) for known in METHODS}
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):  # what the module itself imports
            raise ValueError(f"the module of methods {name!r} fails at import: {in_one_line(error)}") from error
        raise ValueError(
            f"found no module {error.name!r} to import methods from: give the dotted name of a Python file in "
            f"{os.getcwd()}, or of an installed package"
        ) from error
    except Exception as error:  # of whatever kind a user's code raises
        reason = str(error) if type(error) is ValueError else in_one_line(error)
        raise ValueError(f"the module of methods {name!r} fails at import: {reason}") from error
    classes = [cls for cls in METHODS.values() if not is_built_in(cls)]
    defined = any(METHODS.defined(cls.name) is not before.get(cls.name) for cls in classes)
    if not (defined or any(cls in vars(module).values() for cls in classes)):
        raise ValueError(
            f"the module {name!r} defines no method: it needs a class of the form "
            "class MyMethod(rope_patch.Method, name='my_method')"
        )
