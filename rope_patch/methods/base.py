"""What the methods share: their parameters, one method, one that scales the context, a chain, and method strings.

A method string is ``NAME[:key=value…]``; several are chained with ``+``, applied from left to right.
"""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rope_patch import frequencies
from rope_patch.methods.already_scaled import (
    ORIGINAL,
    context_before,
    context_reached,
    is_known,
    own_factor,
    stopped_as,
)
from rope_patch.options.fields import Option
from rope_patch.registry import Registry
from rope_patch.runtime.text import did_you_mean
from rope_patch.tables import RotaryTable

METHODS: Registry[type[Method]] = Registry("method", "rope_patch.methods")
"""Method name to class, in the order of definition; classes of installed packages come last."""


# --- parameters ------------------------------------------------------------------------------------------------------


def number(default: Any, **bounds: Any) -> Any:
    """Declare a parameter with bounds, which hold for every number of a list.

    Args:
        default: the default value; None for a parameter that may be left out.
        **bounds: ``least`` and ``most``, the smallest and the largest value that are allowed; ``above`` and ``below``,
            the numbers that a value must exceed and stay below; and ``unit``, for error messages.
    """
    return field(default=default, metadata=bounds)


def field_help(f: Field[Any]) -> str:
    """Return ``name=default`` of a parameter as a method string writes it; ``name=…`` if it has no default."""
    default = "…"
    if f.default is not MISSING and f.default is not None:
        default = parameter_text(f.default)
    return f"{f.name}={default}"


def _read(f: Field[Any], value: Any, kind: Any) -> Any:
    """Return the value of a parameter in its declared type: float, int, bool, str, a tuple of floats, or None.

    Raises:
        ValueError: the value is of another type, or out of its bounds.
    """
    allowed = typing.get_args(kind)
    optional = type(None) in allowed
    if optional:
        kind = next(each for each in allowed if each is not type(None))
    several = kind not in (float, int, bool, str)
    if hasattr(value, "tolist"):  # a tensor or an array
        value = value.tolist()
    if value == "none":  # how a method string writes None
        value = None
    if several:
        kind = float
        if isinstance(value, str):
            value = value.split("/")
    option = Option("", "", kind=kind, several=several, optional=optional, default=f.default, **f.metadata)
    value = option.checked(f.name, option.value_of(value))
    # Tables are float32: beyond these a number would become infinite, or lose its digits as it nears 0.
    if isinstance(value, int | float) and value and not 1e-37 < abs(value) < 1e37:
        raise ValueError(f"{f.name} must be a number that float32 holds, got {value!r}")
    if kind is str and set(str(value)) & set(":+,="):
        raise ValueError(f"{f.name} must be a word, got {value!r}")
    return value


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


# --- one method ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """Base class of every method.

    A subclass names itself (``class PI(Method, name="pi")``), declares its parameters as dataclass fields with defaults
    (:func:`~rope_patch.methods.number` for those with bounds), and gives the frequencies in :meth:`inv_freq`. The rest
    is optional: :meth:`scaling`, :meth:`rope_parameters`, :meth:`check_table`, and ``recomputes``.
    """

    name: ClassVar[str] = ""
    recomputes: ClassVar[bool] = False
    """Whether the table is computed anew from ``rope_theta``; a table that is not plain RoPE is then refused."""
    own_types: ClassVar[tuple[str, ...]] = ()
    """The types of transformers whose factor the method raises where a checkpoint has one of them already."""
    extends: ClassVar[bool] = False
    """Whether the table reaches further by numbers that do not tell how far (a base, a list). In a chain with such a
    method no factor is checked against a target."""

    def __init_subclass__(cls, name: str = "", **kwargs: Any) -> None:
        """Register the class under ``name``."""
        super().__init_subclass__(**kwargs)
        if name:
            # Otherwise the error would come only when the method is first applied.
            if cls.inv_freq is Method.inv_freq and cls.__call__ is Method.__call__:
                raise ValueError(f"the method {name!r} must define inv_freq")
            cls.name = name
            METHODS.add(name, cls)

    def __post_init__(self) -> None:
        kinds = typing.get_type_hints(type(self))
        for f in fields(self):
            # From a method string or a command line every value comes as text.
            value = _read(f, getattr(self, f.name), kinds[f.name])
            # The dataclass is frozen, so an ordinary assignment raises.
            object.__setattr__(self, f.name, value)
        self.check()

    def check(self) -> None:
        """Raise ValueError if parameters do not go together."""

    def inv_freq(self, table: RotaryTable) -> Tensor:
        """Return the frequencies: (pairs,) float32 [rad/token]; those of the argument are not changed."""
        raise NotImplementedError

    def scaling(self, table: RotaryTable) -> float:
        """Return the factor on cos and sin; unless a method overrides this, it is that of the table."""
        return table.attention_scaling

    def rope_parameters(self, table: RotaryTable) -> dict[str, Any] | None:
        """Return the ``rope_parameters`` from which transformers computes the new table; None if it cannot."""
        return None

    def check_table(self, table: RotaryTable) -> None:
        """Raise ValueError if the method is not made for this table."""

    def __call__(self, table: RotaryTable) -> RotaryTable:
        """Return the new table; if nothing changes, return the same object, which keeps its encoding."""
        new = None
        if not table.is_plain:
            new = self.on_scaled(table)
            if new is None and self.recomputes and not table.is_geometric:
                raise ValueError(
                    f"{self.name} recomputes the table from rope_theta, but {table.path} is already scaled or not "
                    f"geometric (rope_type {table.rope_type!r}). pi, p_rope and longrope change a table as it is. To "
                    "begin with plain RoPE, write rope_type 'default' and the context before the scaling into "
                    f"config.json. In a chain put {self.name} first"
                )
        if new is None:
            new = self.computed(table)
        if torch.equal(new.inv_freq, table.inv_freq) and new.attention_scaling == table.attention_scaling:
            return table
        return new

    def computed(self, table: RotaryTable) -> RotaryTable:
        """Return the table that the method's own expressions give."""
        self.check_table(table)
        # A copy, since a method of the user's own may work in place.
        inv_freq = self.inv_freq(replace(table, inv_freq=table.inv_freq.clone()))
        if not isinstance(inv_freq, Tensor):
            raise TypeError(f"the method {self.name!r} must return its frequencies as a tensor, got {inv_freq!r}")
        encoding = self.rope_parameters(table)
        return table.becomes(inv_freq, rope_parameters=encoding, attention_scaling=self.scaling(table))

    def on_scaled(self, table: RotaryTable) -> RotaryTable | None:
        """Return the new table for one that is scaled already; None if the method treats it like any other."""
        return None

    @property
    def named_layer_types(self) -> tuple[str, ...]:
        """The layer types that the method, or one of its steps, names; its table is for these alone."""
        kind = getattr(self, "layer_type", None)
        return () if kind is None else (kind,)

    @property
    def needs_target(self) -> bool:
        """Whether a factor was left out, which a target length has to fill in."""
        return False

    def for_target(self, table: RotaryTable, target_length: int | None) -> Method:
        """Return the method for a target length: a factor that was left out is filled in, a given one is checked.

        Args:
            table: the table of the checkpoint.
            target_length: the requested context length [tokens]; None if there is none.

        Raises:
            ValueError: there is neither a factor nor a target, or the two contradict each other.
        """
        return self

    def on_tables(self, tables: Sequence[RotaryTable], target_length: int | None) -> Method:
        """Return the method for a target length as :meth:`for_target` does, with the one factor that all tables need.

        Raises:
            ValueError: as in :meth:`for_target`, or the tables need different factors.
        """
        methods = [self.for_target(table, target_length) for table in tables]
        if len(names := {str(method): None for method in methods}) > 1:
            raise ValueError(
                f"the tables of this model need different factors ({', '.join(names)}): patch one at a time"
            )
        return methods[0]

    def extended_to(self, tables: Sequence[RotaryTable], target_length: int | None) -> Method:
        """Return the result of :meth:`on_tables`, and refuse a target below the stated context."""
        least = tables[0].max_position_embeddings
        if target_length is not None and target_length < least:
            raise ValueError(
                f"target_length {target_length} is shorter than the context of the checkpoint, {least} tokens"
            )
        return self.on_tables(tables, target_length)

    def reach(self, table: RotaryTable) -> int | None:
        """Return the context that the method's factor stretches a table to [tokens]; None if it has no factor."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return ``{"method": name, parameter: value, …}`` as JSON values."""
        return {"method": self.name, **asdict(self)}

    def __str__(self) -> str:
        """Return the method string: the first parameter, and those that differ from their defaults."""
        shown = []
        for i, f in enumerate(fields(self)):
            value = getattr(self, f.name)
            if value is not None and (i == 0 or value != f.default):
                shown.append(f"{f.name}={parameter_text(value)}")
        return ":".join([self.name, *shown])


@dataclass(frozen=True)
class Scaling(Method):
    """Base class of the methods whose ``factor`` stretches the context; the default follows from a target length.

    The factor is the new context divided by the one that the checkpoint states. On a table that is scaled already a
    method of the same type raises its factor, and a method that recomputes the table starts from the plain one, with
    the whole factor over the context before any scaling.
    """

    factor: float | None = number(None, least=1)
    ends: ClassVar[tuple[str, ...]] = ()
    """The names of two parameters of which the first must exceed the second."""

    def check(self) -> None:
        """Raise unless the first of the two ends exceeds the second."""
        values = [getattr(self, name) for name in self.ends]
        if values and values[0] <= values[1]:
            raise ValueError(f"{' must exceed '.join(self.ends)}, got {values[0]} and {values[1]}")

    def context_of(self, table: RotaryTable) -> int:
        """Return the context that the factor multiplies [tokens]: what the table reaches, without its scaling."""
        if table.is_plain:
            return getattr(self, ORIGINAL, None) or table.context
        return context_reached(table)

    def on_scaled(self, table: RotaryTable) -> RotaryTable | None:
        """Return the table of the checkpoint's own type with a larger factor, or one that is computed anew."""
        given_original = getattr(self, ORIGINAL, None)
        if given_original is not None and is_known(table):
            context_before(table, given_original)  # raises where the checkpoint says another
        if table.rope_type in self.own_types:
            own = self._raised(table)
            if own is not None:
                return own
        if not self.recomputes or not is_known(table):
            return None
        original = context_before(table, given_original)
        whole: dict[str, Any] = {"factor": self.stretch * context_reached(table) / original}
        stated = table.rope_parameters or {}
        both = [stated.get(name) for name in ("mscale", "mscale_all_dim")]
        # Attention of such a family scales its logits, too, so that cos and sin keep the ratio of the two.
        if all(both) and getattr(self, "attention_factor", 0) is None and not getattr(self, "mscale", None):
            whole["attention_factor"] = frequencies.yarn_scaling(whole["factor"], *both)
        plain = replace(table.plain(), original_max_position_embeddings=original)
        return stopped_as(table, replace(self, **whole).computed(plain))

    def _raised(self, table: RotaryTable) -> RotaryTable | None:
        """Return the table of the checkpoint's own type with a larger factor, as :func:`restated` does.

        An ``attention_factor`` that is what the factor implies follows it; any other is a setting, and is kept.
        """
        stated = dict(table.rope_parameters or {})
        changes = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name != "factor" and value != f.default:
                changes[f.name] = value
        if not changes.keys().isdisjoint(self.ends):
            try:
                as_stated(type(self), stated | changes).check()
            except ValueError as error:
                raise ValueError(f"{error}: config.json states the one that is not given, choose another") from None
        factor = own_factor(table)
        attention = stated.get("attention_factor")
        if attention is not None and math.isclose(attention, frequencies.yarn_scaling(factor), rel_tol=1e-6):
            changes.setdefault("attention_factor", frequencies.yarn_scaling(factor * self.stretch))
        return restated(table, factor=factor * self.stretch, **changes)

    @property
    def needs_target(self) -> bool:
        """Whether the factor was left out, so that a target length has to fill it in."""
        return self.factor is None

    @property
    def stretch(self) -> float:
        """The factor.

        Raises:
            ValueError: the factor was left out.
        """
        if self.factor is None:
            raise ValueError(f"{self.name} needs a factor, or a target_length to take it from: {self.name}:factor=4")
        return self.factor

    def for_target(self, table: RotaryTable, target_length: int | None) -> Scaling:
        """Return the method with its factor filled in or checked."""
        return self.stretched(self.context_of(table), target_length)

    def stretched(self, context: float, target_length: int | None) -> Scaling:
        """Return the method with the factor that stretches a context to a target length [tokens]."""
        if target_length is None:
            return replace(self, factor=self.stretch)
        needed = max(1.0, target_length / context)
        if self.factor is None:
            return replace(self, factor=needed)
        # The factor that the message advises has six digits, so it may miss the target by less than a token.
        if self.factor * context < target_length - 1:
            raise ValueError(
                f"{self.name}:factor={self.factor:g} reaches {round(self.factor * context)} tokens of the "
                f"target_length {target_length}: give factor={needed:g}, or leave the factor out"
            )
        return self

    def reach(self, table: RotaryTable) -> int | None:
        """Return the context times the factor [tokens]."""
        return None if self.factor is None else round(self.context_of(table) * self.factor)


def restated(table: RotaryTable, **changes: Any) -> RotaryTable | None:
    """Return the table that the checkpoint's own type gives with some of its parameters changed.

    Args:
        table: a table of the checkpoint, as it was found.
        **changes: the parameters of its ``rope_parameters`` that change, ``factor`` or ``rope_theta`` among them.

    Returns:
        The table, with every other key as the checkpoint states it; None if no method has the type, or if the model's
        class computes its table in a way of its own.
    """
    owner = owner_of(table)
    if owner is None:
        return None
    stated = dict(table.rope_parameters or {})
    # A stated context that grows must change neither the context before the scaling nor the factor.
    if hasattr(owner, ORIGINAL):
        stated.setdefault(ORIGINAL, table.context)
    if "factor" in stated:
        stated["factor"] = own_factor(table)
    found = _of_type(owner, table, stated)
    if not torch.allclose(found.inv_freq, table.inv_freq, rtol=1e-6, atol=0.0):
        return None
    return _of_type(owner, table, {**stated, **changes})


def _of_type(owner: type[Method], table: RotaryTable, parameters: dict[str, Any]) -> RotaryTable:
    """Return the table that transformers computes from parameters of the type of a table, which a method raises."""
    theta = float(parameters["rope_theta"])
    plain = frequencies.geometric(theta, table.rotary_dim)
    if table.rope_type == "proportional":
        rotated = int((~frequencies.unrotated(table.inv_freq)).sum())
        plain = torch.zeros_like(plain)
        plain[:rotated] = frequencies.geometric(theta, table.rotary_dim, rotated)
    base = replace(table, inv_freq=plain, attention_scaling=1.0, rope_theta=theta, rope_type="default")
    method = as_stated(owner, {"factor": 1.0} | parameters)
    return table.becomes(method.inv_freq(base), rope_parameters=parameters, attention_scaling=method.scaling(base))


def owner_of(table: RotaryTable) -> type[Method] | None:
    """Return the method of the type that a table has already; None if there is none."""
    return next((method for method in METHODS.data.values() if table.rope_type in method.own_types), None)


def as_stated(owner: type[Method], parameters: Mapping[str, Any]) -> Method:
    """Return a method with the parameters that a checkpoint states, which transformers computes whatever they are."""
    # Bounds are for arguments, so nothing is checked here.
    method = object.__new__(owner)
    for f in fields(owner):
        value = parameters.get(f.name, f.default)
        # A number of 0 counts as the default there, and null switches `truncate` off.
        if isinstance(f.default, bool):
            value = bool(value)
        elif not value:
            value = f.default
        object.__setattr__(method, f.name, value)
    return method


@dataclass(frozen=True)
class _FromPlain(Method):
    """A method that starts from plain RoPE: ``replace_scaling`` in records of versions up to 0.3.0."""

    method: Method

    def __post_init__(self) -> None:
        # The method was read already.
        pass

    def __call__(self, table: RotaryTable) -> RotaryTable:
        """Return the table that the method makes of the plain one."""
        return self.method(table.plain())

    def to_dict(self) -> dict[str, Any]:
        """Return the method as the record has it."""
        return {**self.method.to_dict(), "replace_scaling": True}

    def __str__(self) -> str:
        """Return the method string as those versions wrote it."""
        return f"{self.method}:replace_scaling=true"


@dataclass(frozen=True)
class Chain(Method):
    """Several methods applied from left to right, each to the table that the one before it returned."""

    steps: tuple[Method, ...] = ()
    # Not in the class statement, which would register it: a chain is written with +, not by its name.
    name: ClassVar[str] = "chain"

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


# --- method strings --------------------------------------------------------------------------------------------------

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
    PI(factor=8.0)
    """
    params = dict(data)
    if params.pop("replace_scaling", False):
        return _FromPlain(from_dict(params))
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
