"""Functions that declare an option once: its help, its unit, its bounds, and how a word of the command line is read.

A dataclass that inherits from :class:`OptionSet` declares its fields with the functions below. The command line, YAML
files, the pages of documentation and the checks of values follow from that, so that no name, default or help is written
twice.

>>> @dataclass(frozen=True)
... class Reading(OptionSet):
...     lengths: tuple[int, ...] = tokens("How much is read.", several=True)
...     samples: int = whole("How often.", 4, least=1)
>>> Reading(lengths=[512]).lengths
(512,)
>>> Reading(lengths=[512], samples=0)
Traceback (most recent call last):
ValueError: samples must be >= 1, got 0
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

from rope_patch.runtime.text import did_you_mean, parse_length

_OPTION_KEY = "option"
"""The key of an :class:`Option` in the metadata of its field."""


@dataclass(frozen=True)
class Option:
    """The description of one option.

    Attributes:
        help: a description for users; the default is added to it.
        metavar: the placeholder of the value in the help, such as ``TOKENS``; "" for a flag, which has no value.
        read: a function that turns a word into a value, if the kind is not enough for that; it raises a ValueError that
            says what is wrong with the word.
        kind: the type of a value: numbers are stored as Python's own, whatever library they come from, a path as a
            ``Path``, and for ``PathLike`` as text. ``dict`` is a section whose keys another library defines.
        least: the smallest value that is allowed.
        most: the largest value that is allowed.
        above: the number that a value must exceed.
        below: the number that a value must stay below.
        unit: the unit of the value, for error messages.
        choices: all allowed values; empty if there is no fixed set of them.
        several: whether the option holds a tuple that is written as one word, its items separated by commas or spaces.
        repeated: whether the option holds a tuple and is given once for each item.
        empty: whether a tuple may have no items although the default has some.
        optional: whether the value may be None although the default is not.
        positional: whether the value stands on the command line without a name.
        name: the name on the command line, without dashes; by default that of the field.
        short: other names on the command line, such as ``-o``.
        needs: of a section of another library, the keys that must be given, such as ``max_length=TOKENS``.
        default: the value if none is given; ``dataclasses.MISSING`` if one must be given.
        path: the names of the fields that lead to the option from the class that :func:`leaves` was called with.
    """

    help: str
    metavar: str
    read: Callable[[str], Any] | None = None
    kind: type = str
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    unit: str = ""
    choices: tuple[str, ...] = ()
    several: bool = False
    repeated: bool = False
    empty: bool = False
    optional: bool = False
    positional: bool = False
    name: str = ""
    short: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    default: Any = None
    path: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The option as it is typed, such as ``--batch-tokens``; the name of an argument without dashes."""
        return self.metavar if self.positional else f"--{self.name}"

    @property
    def key(self) -> str:
        """The name in files and in Python: that of the field, behind that of its section if it has one."""
        section, dot, _ = self.name.rpartition(".")
        return f"{section}{dot}{self.path[-1]}"

    @property
    def shown(self) -> str:
        """The default as the help shows it; "" if there is none, or if it means that nothing is set."""
        if self.default is MISSING or self.default is None or self.default is False or self.default == ():
            return ""
        items = self.default if isinstance(self.default, tuple) else (self.default,)
        return " ".join(map(self._shown, items))

    def _shown(self, value: Any) -> str:
        if value is True:
            return "on"
        # As users write lengths: 8k, not 8192.
        if self.unit == "tokens" and value % 1024 == 0 and value:
            return f"{value // 1024}k"
        if isinstance(value, float):
            return f"{value:g}"
        return str(value)

    def value_of(self, value: Any) -> Any:
        """Return the value that a word means, or the words of a list; what means none is left for :meth:`checked`."""
        if isinstance(value, list | tuple):
            return tuple(map(self.value_of, value))
        if not isinstance(value, str):
            return value
        if self.read is not None:
            return self.read(value)
        if self.kind is bool:
            return {"true": True, "false": False}.get(value.lower(), value)
        if self.kind in (int, float):
            with contextlib.suppress(ValueError):
                return self.kind(value)
        return value

    def checked(self, name: str, value: Any) -> Any:
        """Return a value as it is stored: a list as a tuple, a whole number as Python's own.

        Args:
            name: the name of the option, for the error message.
            value: the value as a user gave it in Python, or as :meth:`value_of` read it.

        Raises:
            ValueError: the value is of another kind, or out of its bounds.
        """
        # None means that the option is not set, so the bounds do not hold for it.
        if value is None and (self.optional or self.default is None):
            return None
        if not (self.several or self.repeated):
            return self._one(name, value)
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ValueError(f"{name} must be a list, got {value!r}")
        if not value and not self.empty and self.default != ():
            raise ValueError(f"{name} is empty: give at least one")
        return tuple(self._one(name, item) for item in value)

    def _one(self, name: str, value: Any) -> Any:
        # Python's True is a number, too.
        if self.kind in (int, float) and isinstance(value, bool):
            raise ValueError(f"{name} must be a number, got {value!r}")
        if self.kind is int:
            try:
                # Accepts NumPy's whole numbers, and refuses 4.0 as well as "4".
                value = operator.index(value)
            except TypeError:
                raise ValueError(f"{name} must be a whole number, got {value!r}") from None
        elif self.kind is float:
            if not isinstance(value, Real):
                raise ValueError(f"{name} must be a number, got {value!r}")
            if not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, got {value!r}")
            value = float(value)
        elif self.kind is bool and not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {value!r}")
        elif value == "":
            raise ValueError(f"{name} is empty: leave it out, or give a value")
        elif self.kind in (Path, PathLike):
            if not isinstance(value, str | PathLike):
                raise ValueError(f"{name} must be a path or a name, got {value!r}")
            # A PathLike option may also hold a name, and its spec is written as JSON: so it is stored as text.
            value = Path(value) if self.kind is Path else str(value)
        self._check_bounds(name, value)
        if self.choices and value not in self.choices:
            known = ", ".join(self.choices)
            raise ValueError(f"{name} must be one of {known}, got {value!r}.{did_you_mean(str(value), self.choices)}")
        return value

    def _check_bounds(self, name: str, value: Any) -> None:
        unit = f" {self.unit}" if self.unit else ""
        if self.least is not None and self.most is not None and not self.least <= value <= self.most:
            raise ValueError(f"{name} must be in [{self.least:g}, {self.most:g}]{unit}, got {value}")
        for bound, sign, holds in (
            (self.least, ">=", operator.ge),
            (self.most, "<=", operator.le),
            (self.above, ">", operator.gt),
            (self.below, "<", operator.lt),
        ):
            if bound is not None and not holds(value, bound):
                raise ValueError(f"{name} must be {sign} {bound:g}{unit}, got {value}")


COUNT = Option("", metavar="COUNT", kind=int, least=1, default=MISSING)
"""A number of things, for the values that no field holds."""


@dataclass(frozen=True)
class OptionSet:
    """A dataclass whose fields are options. The values are checked when an object is made.

    ``class TasksOptions(OptionSet, command="tasks")`` holds the options of a command, and its docstring is the help of
    that command.
    """

    command: ClassVar[str] = ""
    aliases: ClassVar[Mapping[str, str]] = {}
    """Further names that are accepted in files and overrides, and the option that each of them means."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Names of earlier versions or of other programs, and what to write instead; they raise."""

    def __init_subclass__(cls, command: str = "") -> None:
        """Store the name of the command."""
        super().__init_subclass__()
        cls.command = command

    def __post_init__(self) -> None:
        """Check every value."""
        for one in fields(self):
            option = one.metadata.get(_OPTION_KEY)
            if option is not None:
                # The dataclass is frozen, so an ordinary assignment raises.
                object.__setattr__(self, one.name, option.checked(one.name, getattr(self, one.name)))


# --- the vocabulary --------------------------------------------------------------------------------------------------


def option(help: str, default: Any = MISSING, **more: Any) -> Any:
    """Return a field for an option that no other function describes; ``more`` are attributes of :class:`Option`."""
    return field(default=default, metadata={_OPTION_KEY: Option(help, default=default, **more)})


whole = partial(option, metavar="COUNT", kind=int)
"""A field for a whole number."""
tokens = partial(option, metavar="TOKENS", kind=int, unit="tokens", read=parse_length, least=1)
"""A field for a number of tokens, written as 8192 or 8k."""
foreign_section = partial(option, metavar="", kind=dict)
"""A field for a section whose keys and values another library defines, in files and ``key=value`` overrides alone."""
number = partial(option, metavar="NUMBER", kind=float)
"""A field for a number."""
word = partial(option, metavar="NAME")
"""A field for a word or a sentence."""
path = partial(option, metavar="PATH", kind=Path)
"""A field for a file or a folder."""


def flag(help: str, default: bool = False, **more: Any) -> Any:
    """Return a field for an option that is either on or off."""
    return option(help, default, metavar="", kind=bool, **more)


def contained(kind: type[OptionSet], *, without: Sequence[str] = (), section: bool = False, **values: Any) -> Any:
    """Return a field for options that others contain, under names of their own on the command line.

    Args:
        kind: the class of the options that are contained.
        without: the fields of that class that are not options here and keep their values.
        section: whether their names have the name of this field in front, as in ``--model.name``.
        **values: defaults that differ from those of the class.
    """
    required = [one.name for one in fields(kind) if one.default is MISSING and one.name not in values]
    # If an inner option must be given, so must the whole.
    default: Any = MISSING if required else kind(**values)
    return field(default=default, metadata={"kind": kind, "without": without, "section": section, "values": values})


# --- what a class declares -------------------------------------------------------------------------------------------


def leaves(kind: type[OptionSet], without: Sequence[str] = (), **values: Any) -> Iterator[Option]:
    """Yield the options of a class and of those that it contains, in their order.

    Args:
        kind: the class whose options are listed.
        without: the fields that are left out.
        **values: defaults that differ from those of the class.
    """
    # Options that commands inherit come first in `fields`, and last in the help.
    for member in sorted(fields(kind), key=lambda one: one.kw_only is True):
        metadata = member.metadata
        if member.name in without:
            continue
        if "kind" in metadata:
            prefix = f"{member.name}." if metadata["section"] else ""
            for leaf in leaves(metadata["kind"], metadata["without"], **metadata["values"]):
                yield replace(leaf, path=(member.name, *leaf.path), name=f"{prefix}{leaf.name}")
        else:
            declared: Option = metadata[_OPTION_KEY]
            name = declared.name or member.name.replace("_", "-")
            yield replace(declared, path=(member.name,), name=name, default=values.get(member.name, member.default))


def from_leaves(kind: type[Any], values: Mapping[tuple[str, ...], Any]) -> Any:
    """Return an object of options, made of the values of its leaves.

    Args:
        kind: the class of the object.
        values: the values by the path of their option; options without a value keep their defaults.
    """
    arguments = {}
    for one in fields(kind):
        inner = {path[1:]: value for path, value in values.items() if path[0] == one.name}
        if "kind" in one.metadata:
            defaults = {(name,): value for name, value in one.metadata["values"].items()}
            try:
                arguments[one.name] = from_leaves(one.metadata["kind"], defaults | inner)
            except ValueError as error:
                if not one.metadata["section"]:
                    raise
                raise ValueError(f"{one.name}.{error}") from None
        elif () in inner:
            # What is left of the path of a leaf is empty.
            arguments[one.name] = inner[()]
        elif inner:
            # A section whose keys another library defines: one key is left of each path.
            arguments[one.name] = {path[0]: value for path, value in inner.items()}
    return kind(**arguments)
