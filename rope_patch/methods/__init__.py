"""The methods: frozen dataclasses that map a table found in a checkpoint to a new one.

A new method is one class: its name, its fields with defaults, its checks, and the expression of its frequencies. The
registry, method strings, the command line and the tests find it there. Classes of a user's own are found in the running
script, in modules that :func:`rope_patch.registry.import_modules` imports, and in installed packages.
"""

from rope_patch.methods.base import (
    METHODS,
    Chain,
    Method,
    MethodLike,
    Scaling,
    as_method,
    create,
    field_help,
    from_dict,
    number,
    parse,
)

# Not sorted: methods are listed everywhere in the order in which their classes are defined.
from rope_patch.methods.p_rope import Default, NoPE, Partial, PRope, PRopeReversed, Truncated  # isort: skip
from rope_patch.methods.interpolation import ABF, NTK, PI, Llama3, MrRope, Yarn  # isort: skip
from rope_patch.methods.table import LongRope, Table, longrope_parameters  # isort: skip

__all__ = [
    "ABF",
    "METHODS",
    "NTK",
    "PI",
    "Chain",
    "Default",
    "Llama3",
    "LongRope",
    "Method",
    "MethodLike",
    "MrRope",
    "NoPE",
    "PRope",
    "PRopeReversed",
    "Partial",
    "Scaling",
    "Table",
    "Truncated",
    "Yarn",
    "as_method",
    "create",
    "field_help",
    "from_dict",
    "longrope_parameters",
    "number",
    "parse",
]
