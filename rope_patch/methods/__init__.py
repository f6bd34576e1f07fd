"""The methods: frozen dataclasses that map a table found in a checkpoint to a new one.

Adding a method is one class: its name, its fields with defaults, its checks, and ``__call__``. The registry, the
grammar, the command line and the tests pick it up from there.
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
    parse,
)

from rope_patch.methods.p_rope import Default, NoPE, Partial, PRope, PRopeReversed  # isort: skip
from rope_patch.methods.base_frequency import ABF, NTK  # isort: skip
from rope_patch.methods.interpolation import PI, Llama3, Yarn  # isort: skip
from rope_patch.methods.longrope import LongRope, longrope_parameters  # isort: skip
from rope_patch.methods.clipping import Truncated  # isort: skip
from rope_patch.methods.table import Table  # isort: skip

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
    "parse",
]
