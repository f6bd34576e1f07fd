"""Methods: their base classes, registry, chains and strings."""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rope_patch import frequencies
from rope_patch.tables import RotaryTable
from rope_patch.words import did_you_mean

METHODS: dict[str, type[Method]] = {}
"""Registry: method name to class, in the order of definition."""


def number(
    default: Any, *, above: float | None = None, least: float | None = None, most: float | None = None, unit: str = ""
) -> Any:
    """Declare a parameter with bounds, which hold for every number of a list.

    Args:
        default: None for a parameter that may be left out.
        above: a number that the value exceeds.
        least: the least value.
        most: the greatest value; together with ``least``.
        unit: of the value, for the message.
    """
    return field(default=default, metadata={"above": above, "least": least, "most": most, "unit": unit})


def _check_bounds(name: str, value: Any, bounds: Mapping[str, Any]) -> None:
    above, least, most = (bounds.get(key) for key in ("above", "least", "most"))
    unit = f" {bounds['unit']}" if bounds.get("unit") else ""
    if above is not None and not value > above:
        raise ValueError(f"{name} must be > {above:g}{unit}, got {value}")
    if most is not None and not least <= value <= most:
        raise ValueError(f"{name} must be in [{least:g}, {most:g}]{unit}, got {value}")
    if least is not None and not value >= least:
        raise ValueError(f"{name} must be >= {least:g}{unit}, got {value}")


@dataclass(frozen=True)
class Method:
    """Base of every method.

    A subclass names itself (``class PI(Method, name="pi")``), declares its parameters as dataclass fields with
    defaults, :func:`number` where they have bounds, and gives the frequencies in :meth:`inv_freq`. Whatever else it
    says is optional: :meth:`scaling`, :meth:`rope_parameters`, :meth:`check_table`, and ``recomputes``. A field
    ``replace_scaling`` hands it the plain table of the base found.
    """

    name: ClassVar[str] = ""
    recomputes: ClassVar[bool] = False
    """Whether the table is computed anew from ``rope_theta``: then one that is not plain RoPE is refused."""
    extends: ClassVar[bool] = False
    """Whether the table reaches further by numbers that say nothing of how far (a base, a list): no factor is checked
    beside such a method."""

    def __init_subclass__(cls, name: str = "", **kwargs: Any) -> None:
        """Register the class under ``name``."""
        super().__init_subclass__(**kwargs)
        if name:
            known = METHODS.get(name)
            if known is not None and known.__qualname__ != cls.__qualname__:  # a cell that is run again is fine
                raise ValueError(f"the method name {name!r} is taken by {known.__qualname__}")
            cls.name = name
            METHODS[name] = cls

    def __post_init__(self) -> None:
        kinds = _field_types(type(self))
        for f in fields(self):
            value = _convert(f.name, getattr(self, f.name), kinds[f.name])
            object.__setattr__(self, f.name, value)
            for one in value if isinstance(value, tuple) else () if value is None else (value,):
                _check_bounds(f.name, one, f.metadata)
        self.check()

    def check(self) -> None:
        """Raise ValueError when parameters do not go together."""

    def inv_freq(self, table: RotaryTable) -> Tensor:
        """Return the frequencies: (pairs,) float32 [rad/token]; those of the argument are not changed."""
        raise NotImplementedError

    def scaling(self, table: RotaryTable) -> float:
        """Return the factor on cos and sin: the table's own, unless a method says otherwise."""
        return table.attention_scaling

    def rope_parameters(self, table: RotaryTable) -> dict[str, Any] | None:
        """Return how transformers itself says the new table, ``rope_theta`` included; None where it has no type."""
        return None

    def check_table(self, table: RotaryTable) -> None:
        """Raise ValueError for a table that the method is not for."""

    def __call__(self, table: RotaryTable) -> RotaryTable:
        """Return the new table; the very one found, with its encoding, where nothing changes."""
        if getattr(self, "replace_scaling", False):
            table = table.plain()
        if self.recomputes and not table.is_geometric:
            raise ValueError(
                f"{self.name} recomputes the table from rope_theta, but {table.path} is already scaled or not "
                f"geometric (rope_type {table.rope_type!r}). Pass replace_scaling=True to drop that scaling first."
            )
        self.check_table(table)
        inv_freq, scaling = self.inv_freq(table), self.scaling(table)
        if torch.equal(frequencies.zero_unrotated(inv_freq), table.inv_freq) and scaling == table.attention_scaling:
            return table
        return table.becomes(inv_freq, rope_parameters=self.rope_parameters(table), attention_scaling=scaling)

    @property
    def needs_target(self) -> bool:
        """Whether a factor was left out, to be taken from a target."""
        return False

    def for_target(self, table: RotaryTable, target_length: int | None) -> Method:
        """Return the method for a target: a factor that was left out is filled in, a given one is checked.

        Args:
            table: the table found.
            target_length: the context asked for [tokens]; None where none was named.

        Raises:
            ValueError: neither a factor nor a target, or two that contradict each other.
        """
        return self

    def reach(self, table: RotaryTable) -> int | None:
        """Return the context that the method's factor stretches a table to [tokens]; None where it states none."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return ``{"method": name, parameter: value, …}``, JSON-ready."""
        return {"method": self.name, **asdict(self)}

    def __str__(self) -> str:
        """Write the method in the grammar: the leading parameter, and whatever is not at its default."""
        shown = []
        for i, f in enumerate(fields(self)):
            value = getattr(self, f.name)
            if value is not None and (i == 0 or value != f.default):
                shown.append(f"{f.name}={_spell(value)}")
        return ":".join([self.name, *shown])


def check_count(name: str, values: Sequence[float] | None, table: RotaryTable) -> None:
    """Raise unless a list that is given has one number for each pair of a table."""
    if values is not None and len(values) != table.pairs:
        raise ValueError(f"{name} needs one number per pair: {table.path} has {table.pairs}, got {len(values)}")


@dataclass(frozen=True)
class Scaling(Method):
    """Base of the methods whose ``factor`` stretches the context; left out, it is taken from ``target_length``."""

    factor: float | None = number(None, least=1)

    def context_of(self, table: RotaryTable) -> int:
        """Return the context that the factor multiplies [tokens]: the one before any scaling of the checkpoint's."""
        return table.context

    @property
    def needs_target(self) -> bool:
        """Whether the factor was left out."""
        return self.factor is None

    @property
    def stretch(self) -> float:
        """The factor.

        Raises:
            ValueError: it was left out.
        """
        if self.factor is None:
            raise ValueError(f"{self.name} needs a factor, or a target_length to take it from: {self.name}:factor=4")
        return self.factor

    def for_target(self, table: RotaryTable, target_length: int | None) -> Scaling:
        """Return the method with its factor."""
        return self.stretched(self.context_of(table), target_length)

    def stretched(self, context: float, target_length: int | None) -> Scaling:
        """Return the method with the factor that takes a context [tokens] to a target."""
        if target_length is None:
            return replace(self, factor=self.stretch)
        needed = max(1.0, target_length / context)
        if self.factor is None:
            return replace(self, factor=needed)
        if self.factor * context < target_length - 1:
            raise ValueError(
                f"{self.name}:factor={self.factor:g} reaches {round(self.factor * context)} tokens of the "
                f"target_length {target_length}: give factor={needed:g}, or leave the factor out"
            )
        return self

    def reach(self, table: RotaryTable) -> int | None:
        """Return the context times the factor [tokens]."""
        return None if self.factor is None else round(self.context_of(table) * self.factor)


@dataclass(frozen=True)
class Chain(Method):
    """Methods applied from left to right, each to the table the one before it left."""

    steps: tuple[Method, ...] = ()
    name: ClassVar[str] = "chain"

    def __post_init__(self) -> None:
        flat = tuple(inner for step in self.steps for inner in (step.steps if isinstance(step, Chain) else (step,)))
        object.__setattr__(self, "steps", flat)
        if len(self.steps) < 2:
            raise ValueError(f"a chain needs at least two methods, got {len(self.steps)}")

    def __call__(self, table: RotaryTable) -> RotaryTable:
        """Apply every step."""
        for step in self.steps:
            table = step(table)
        return table

    @property
    def needs_target(self) -> bool:
        """Whether any step needs one."""
        return any(step.needs_target for step in self.steps)

    def for_target(self, table: RotaryTable, target_length: int | None) -> Chain:
        """Return the chain with the one factor that may be left out filled in; all factors count towards the target."""
        scaling = [step for step in self.steps if isinstance(step, Scaling)]
        bare = [step for step in scaling if step.factor is None]
        if len(bare) > 1:
            raise ValueError(f"at most one method of a chain may leave its factor out: {self}")
        if not bare and any(step.extends for step in self.steps):
            return self
        steps = [step if isinstance(step, Scaling) else step.for_target(table, None) for step in self.steps]
        if scaling:
            chosen = bare[0] if bare else scaling[-1]
            others = math.prod(step.stretch for step in scaling if step is not chosen)
            filled = chosen.stretched(scaling[0].context_of(table) * others, target_length)
            steps = [filled if step is chosen else step for step in steps]
        return Chain(tuple(steps))

    def reach(self, table: RotaryTable) -> int | None:
        """Return what all factors together stretch the context to [tokens]; None without any."""
        scaling = [step for step in self.steps if isinstance(step, Scaling)]
        if not scaling or self.needs_target or any(step.extends for step in self.steps):
            return None
        return round(scaling[0].context_of(table) * math.prod(step.stretch for step in scaling))

    def to_dict(self) -> dict[str, Any]:
        """Return ``{"method": "chain", "steps": [...]}``."""
        return {"method": "chain", "steps": [step.to_dict() for step in self.steps]}

    def __str__(self) -> str:
        """Join the steps with ``+``."""
        return "+".join(map(str, self.steps))


MethodLike = str | Method | Mapping[str, Any] | Sequence[Any]


def parse(text: str) -> Method:
    """Parse the grammar ``NAME[:key=value…][+NAME…]``.

    Raises:
        ValueError: an unknown name or parameter (with the nearest known one), or a value out of range.

    >>> str(parse("abf:rope_theta=500000+p_rope:p=0.5"))
    'abf:rope_theta=500000+p_rope:p=0.5'
    """
    steps = [_parse_one(part) for part in re.split(r"(?<!\d[eE])\+", text)]  # 1e+20 is one number
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
        ValueError: unknown method or parameter, or a value out of range.

    >>> create("p_rope", p="0.5")
    PRope(p=0.5)
    """
    cls = METHODS.get(name)
    if cls is None:
        raise ValueError(f"unknown method {name!r}.{did_you_mean(name, METHODS)} Known: {', '.join(METHODS)}")
    known = [f.name for f in fields(cls)]
    for key in params:
        if key not in known:
            takes = ", ".join(known) or "no parameters"
            raise ValueError(f"{name} has no parameter {key!r}.{did_you_mean(key, known)} It takes: {takes}")
    return cls(**params)


def from_dict(data: Mapping[str, Any]) -> Method:
    """Return the method that ``to_dict`` described; unknown keys are refused.

    >>> from_dict({"method": "pi", "factor": 8})
    PI(factor=8.0, replace_scaling=False)
    """
    params = dict(data)
    name = params.pop("method", None)
    if not isinstance(name, str):
        raise ValueError(f"expected a 'method' key with a name, got {dict(data)!r}")
    if name != "chain":
        return create(name, **params)
    steps = params.pop("steps", ())
    if params:
        raise ValueError(f"a chain has no parameter {next(iter(params))!r}. It takes: steps")
    return Chain(tuple(as_method(step) for step in steps))


def as_method(method: MethodLike, **params: Any) -> Method:
    """Return a method from any of its forms: a name with parameters, the grammar, an object, a dict, or a sequence."""
    if isinstance(method, str):
        if not params:
            return parse(method)
        if ":" in method or "+" in method:
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


def _field_types(cls: type[Method]) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def field_help(f: Field[Any]) -> str:
    """Return ``name=default`` of a parameter as the grammar writes it; empty value where it has none."""
    return f"{f.name}={_spell(f.default) if f.default is not MISSING and f.default is not None else '…'}"


def _convert(name: str, value: Any, kind: Any) -> Any:
    """Convert to the declared field type: float, int, bool, str, a tuple of floats, each possibly with None."""
    union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    options = typing.get_args(kind) if union else (kind,)
    if type(None) in options:
        if value is None or value == "none":
            return None
        kind = next(option for option in options if option is not type(None))
    if kind is bool:
        words = {"true": True, "false": False}
        if str(value).lower() not in words:
            raise ValueError(f"{name} must be true or false, got {value!r}")
        return words[str(value).lower()]
    if kind in (int, float):
        number = _number(name, value, kind)
        if number and not 1e-37 < abs(number) < 1e37:
            raise ValueError(f"{name} must be a number that float32 holds, got {value!r}")
        return number
    if kind is str:
        if not isinstance(value, str) or not value or set(value) & set(":+,="):
            raise ValueError(f"{name} must be a word, got {value!r}")
        return value
    items = value.split("/") if isinstance(value, str) else value
    if not isinstance(items, Iterable):
        raise ValueError(f"{name} must be numbers joined by '/', got {value!r}")
    numbers = tuple(_number(name, item, float) for item in items)
    if not numbers:
        raise ValueError(f"{name} must not be empty")
    return numbers


def _number(name: str, value: Any, kind: type) -> float | int:
    wanted = "a whole number" if kind is int else "a number"
    hint = ""
    if isinstance(value, str) and "," in value:
        hint = " (parameters are separated by ':', the numbers of a list by '/')"
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
    except (ValueError, TypeError, OverflowError):
        raise ValueError(f"{name} must be {wanted}, got {value!r}{hint}") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {value}")
    if kind is int and not number.is_integer():
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    return int(number) if kind is int else number


def _spell(value: Any) -> str:
    """Write a value so that the grammar reads it back: no comma, no plus sign."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return "/".join(map(_spell, value))
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return repr(value).replace("e+", "e")
