"""Declares the parameters of methods, checks them, reads them from text and writes them."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterable
from dataclasses import MISSING, Field, field
from typing import Any


def number(
    default: Any, *, above: float | None = None, least: float | None = None, most: float | None = None, unit: str = ""
) -> Any:
    """Declare a parameter with bounds, which hold for every number of a list.

    Args:
        default: the default value; None for a parameter that may be left out.
        above: the number that the value must exceed.
        least: the smallest value that is allowed.
        most: the largest value that is allowed; it needs ``least``.
        unit: the unit of the value, for error messages.
    """
    return field(default=default, metadata={"above": above, "least": least, "most": most, "unit": unit})


def field_help(f: Field[Any]) -> str:
    """Return ``name=default`` of a parameter as a method string writes it; ``name=…`` if it has no default."""
    default = "…"
    if f.default is not MISSING and f.default is not None:
        default = parameter_text(f.default)
    return f"{f.name}={default}"


def convert(name: str, value: Any, kind: Any) -> Any:
    """Return a value in the declared type: float, int, bool, str, a tuple of floats, each possibly with None."""
    union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    options = typing.get_args(kind) if union else (kind,)
    if type(None) in options:
        # How a method string writes None.
        if value is None or value == "none":
            return None
        kind = next(option for option in options if option is not type(None))
    if kind is bool:
        words = {"true": True, "false": False}
        if str(value).lower() not in words:
            raise ValueError(f"{name} must be true or false, got {value!r}")
        return words[str(value).lower()]
    if kind in (int, float):
        converted = _number(name, value, kind)
        # Tables are float32: beyond these a number would become infinite, or lose its digits as it nears 0.
        if converted and not 1e-37 < abs(converted) < 1e37:
            raise ValueError(f"{name} must be a number that float32 holds, got {value!r}")
        return converted
    if kind is str:
        if not isinstance(value, str) or not value or set(value) & set(":+,="):
            raise ValueError(f"{name} must be a word, got {value!r}")
        return value
    if isinstance(value, str):
        value = value.split("/")
    if not isinstance(value, Iterable):
        raise ValueError(f"{name} must be numbers joined by '/', got {value!r}")
    numbers = tuple(_number(name, item, float) for item in value)
    if not numbers:
        raise ValueError(f"{name} must not be empty")
    return numbers


def _number(name: str, value: Any, kind: type) -> float | int:
    rule = "a whole number" if kind is int else "a number"
    hint = ""
    if isinstance(value, str) and "," in value:
        hint = " (parameters are separated by ':', the numbers of a list by '/')"
    try:
        if isinstance(value, bool):
            raise ValueError
        converted = float(value)
    except (ValueError, TypeError, OverflowError):
        raise ValueError(f"{name} must be {rule}, got {value!r}{hint}") from None
    if not math.isfinite(converted):
        raise ValueError(f"{name} must be finite, got {value}")
    if kind is not int:
        return converted
    if not converted.is_integer():
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    return int(converted)


def parameter_text(value: Any) -> str:
    """Return a value as text that a method string reads back: without a comma or a plus sign."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return "/".join(map(parameter_text, value))
    # Below 1e15 every whole float has an exact decimal form of few digits: 4.0 is written as 4.
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    # A plus sign would join two methods: 1e+20 is written as 1e20.
    return repr(value).replace("e+", "e")
