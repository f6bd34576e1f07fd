"""Reads methods from any form: a method string, a name with parameters, an object, a dict or a list.

A method string is ``NAME[:key=value…]``; several are chained with ``+``, applied from left to right.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from rope_patch.methods.base import METHODS, Chain, Method
from rope_patch.runtime.text import did_you_mean

MethodLike = str | Method | Mapping[str, Any] | Sequence[Any]


def parse(text: str) -> Method:
    """Return the method of a method string, ``NAME[:key=value…][+NAME…]``.

    Raises:
        ValueError: a name or parameter is unknown (the nearest known one is named), or a value is out of range.

    Example:
        >>> str(parse("abf:rope_theta=500000+p_rope:p=0.5"))
        'abf:rope_theta=500000+p_rope:p=0.5'
    """
    steps = [_parse_one(part) for part in re.split(r"(?<!\d[eE])\+", text)]  # the + of 1e+20 joins no methods
    return steps[0] if len(steps) == 1 else Chain(tuple(steps))


def _parse_one(text: str) -> Method:
    name, *pairs = (part.strip() for part in text.split(":"))
    params = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key or not value:
            raise ValueError(f"expected key=value after {name!r}, got {pair!r} in {text!r}")
        if key in params:
            raise ValueError(f"{key!r} is given twice in {text!r}")
        params[key] = value
    return create(name, **params)


def create(name: str, /, **params: Any) -> Method:
    """Return the method ``name`` with ``params``; strings are converted to each field's type.

    Raises:
        ValueError: the method or a parameter is unknown, or a value is out of range.

    >>> create("p_rope", p="0.5")
    PRope(p=0.5)
    """
    cls = METHODS.find(name)
    known = [f.name for f in fields(cls)]
    for key in params:
        if key not in known:
            takes = ", ".join(known) or "no parameters"
            raise ValueError(f"{name} has no parameter {key!r}.{did_you_mean(key, known)} It takes: {takes}")
    return cls(**params)


def from_dict(data: Mapping[str, Any]) -> Method:
    """Return the method that ``to_dict`` described; an unknown key raises ValueError.

    >>> from_dict({"method": "pi", "factor": 8})
    PI(factor=8.0, replace_scaling=False)
    """
    params = dict(data)
    name = params.pop("method", None)
    if not isinstance(name, str):
        raise ValueError(f"expected a 'method' key with a name, got {dict(data)!r}")
    if name != Chain.name:  # whose parameters are methods themselves
        return create(name, **params)
    steps = params.pop("steps", ())
    if params:
        raise ValueError(f"a chain has no parameter {next(iter(params))!r}. It takes: steps")
    return Chain(tuple(as_method(step) for step in steps))


def as_method(method: MethodLike, **params: Any) -> Method:
    """Return a method from any of its forms: a string, a name with parameters, an object, a dict, or a sequence."""
    if isinstance(method, str):
        if not params:
            return parse(method)
        if set(method) & set(":+"):
            raise ValueError(f"give parameters in the string or as keywords, not both: {method!r} and {sorted(params)}")
        return create(method, **params)
    if params:
        raise TypeError(f"keywords {sorted(params)} only go with a method's name, not with {type(method).__name__}")
    if isinstance(method, Method):
        return method
    if isinstance(method, Mapping):
        return from_dict(method)
    if isinstance(method, Sequence) and method:
        steps = tuple(as_method(item) for item in method)
        return steps[0] if len(steps) == 1 else Chain(steps)
    raise TypeError(f"expected a method's name, object, dict, or a non-empty sequence of them, got {method!r}")
