"""The methods, a file each: frozen dataclasses that map a table found in a checkpoint to a new one.

A new method is one class in a file of this folder: its name, its fields with defaults, its checks, and the expression
of its frequencies. The registry, method strings, the command line and the tests find it there. Classes of a user's own
are found in the running script, in modules that :func:`rope_patch.registry.import_modules` imports, and in installed
packages.
"""

import importlib
import pkgutil

from rope_patch.methods.method import METHODS, Method, number
from rope_patch.methods.parse import Chain, MethodLike, as_method, create, field_help, from_dict, parse
from rope_patch.methods.scaling import Scaling

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")  # which registers its class

__all__ = [
    "METHODS",
    "Chain",
    "Method",
    "MethodLike",
    "Scaling",
    "as_method",
    "create",
    "field_help",
    "from_dict",
    "number",
    "parse",
]
