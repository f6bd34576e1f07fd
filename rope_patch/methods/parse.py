"""Method strings, chains, and the other forms in which a method is given.

A method string is ``NAME[:key=value…]``; several are chained with ``+``, applied from left to right.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from rope_patch.methods.method import METHODS, Method, parameter_text
from rope_patch.methods.scaling import Scaling
from rope_patch.runtime.text import did_you_mean
from rope_patch.tables import RotaryTable

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
        if not equals or not key or not value or "," in value:
            raise ValueError(
                f"expected key=value after {name!r}, got {pair!r} in {text!r}: parameters are separated by ':', the "
                "numbers of a list by '/'"
            )
        if key in params:
            raise ValueError(f"{key!r} is given twice in {text!r}")
        params[key] = value
    return create(name, **params)


ROPE_TYPES = {"linear": "pi", "proportional": "p_rope"}
"""The rope types of transformers whose method has another name."""


def create(name: str, /, **params: Any) -> Method:
    """Return the method ``name`` with ``params``; strings are converted to each field's type.

    Raises:
        ValueError: the method or a parameter is unknown, or a value is out of range.

    >>> create("p_rope", p="0.5")
    PRope(p=0.5)
    """
    if name in ROPE_TYPES and name not in METHODS:
        raise ValueError(f"transformers' rope_type {name!r} is written by the method {ROPE_TYPES[name]!r}: take that")
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
    PI(factor=8.0)
    """
    params = dict(data)
    if params.get("replace_scaling") is False:  # which records of versions up to 0.3.0 hold
        del params["replace_scaling"]
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


@dataclass(frozen=True)
class Chain(Method):
    """Several methods applied from left to right, each to the table that the one before it returned."""

    steps: tuple[Method, ...] = ()
    # Not in the class statement, which would register it: a chain is written with +, not by its name.
    name = "chain"

    def __post_init__(self) -> None:
        # A chain within a chain is the same as its steps; so equal chains compare equal and have one method string.
        flat: list[Method] = []
        for step in self.steps:
            if isinstance(step, Chain):
                flat += step.steps
            else:
                flat.append(step)
        object.__setattr__(self, "steps", tuple(flat))
        if len(self.steps) < 2:
            raise ValueError(f"a chain needs at least two methods, got {len(self.steps)}")

    def __call__(self, table: RotaryTable) -> RotaryTable:
        """Apply every step."""
        for step in self.steps:
            table = step(table)
        return table

    @property
    def named_layer_types(self) -> tuple[str, ...]:
        """The layer types that the steps name."""
        return tuple(kind for step in self.steps for kind in step.named_layer_types)

    @property
    def needs_target(self) -> bool:
        """Whether any step needs a target length."""
        return any(step.needs_target for step in self.steps)

    def for_target(self, table: RotaryTable, target_length: int | None) -> Chain:
        """Return the chain with its missing factor filled in; the product of all factors has to reach the target."""
        scaling = [step for step in self.steps if isinstance(step, Scaling)]
        without_factor = [step for step in scaling if step.factor is None]
        if len(without_factor) > 1:
            raise ValueError(f"at most one method of a chain may leave its factor out: {self}")
        # The base or list of such a step may reach the target, so the factors alone need not.
        if not without_factor and any(step.extends for step in self.steps):
            return self
        if not scaling:
            return self
        # If no factor is missing, the last one is checked, given the others.
        chosen = (without_factor or scaling)[-1]
        others = math.prod(step.stretch for step in scaling if step is not chosen)
        filled = chosen.stretched(scaling[0].context_of(table) * others, target_length)
        return Chain(tuple(filled if step is chosen else step for step in self.steps))

    def reach(self, table: RotaryTable) -> int | None:
        """Return the context that all factors together reach [tokens]; None if no step has one."""
        scaling = [step for step in self.steps if isinstance(step, Scaling)]
        if not scaling or any(step.extends for step in self.steps):
            return None
        return round(scaling[0].context_of(table) * math.prod(step.stretch for step in scaling))

    def to_dict(self) -> dict[str, Any]:
        """Return ``{"method": "chain", "steps": [...]}``."""
        return {"method": "chain", "steps": [step.to_dict() for step in self.steps]}

    def __str__(self) -> str:
        """Return the method strings of the steps, joined with ``+``."""
        return "+".join(map(str, self.steps))


def field_help(f: Field[Any]) -> str:
    """Return ``name=default`` of a parameter as a method string writes it; ``name=…`` if it has no default."""
    default = "…"
    if f.default is not MISSING and f.default is not None:
        default = parameter_text(f.default)
    return f"{f.name}={default}"
