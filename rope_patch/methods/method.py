"""What every method is: its parameters, and what it makes of a table."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import Field, asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rope_patch.options.fields import Option
from rope_patch.registry import Registry
from rope_patch.tables import RotaryTable

METHODS: Registry[type[Method]] = Registry("method", "rope_patch.methods")
"""Method name to class, in the order of definition; classes of installed packages come last."""


def number(default: Any, **bounds: Any) -> Any:
    """Declare a parameter with bounds, which hold for every number of a list.

    Args:
        default: the default value; None for a parameter that may be left out.
        **bounds: ``least`` and ``most``, the smallest and the largest value that are allowed; ``above`` and ``below``,
            the numbers that a value must exceed and stay below; and ``unit``, for error messages.
    """
    return field(default=default, metadata=bounds)


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
