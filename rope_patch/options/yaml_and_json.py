"""Writes options as YAML and JSON, and reads them back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from rope_patch.options.fields import Option, OptionSet, from_leaves, leaves
from rope_patch.runtime.text import did_you_mean

T = TypeVar("T", bound=OptionSet)


def options_from_dict(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return options from the values that :func:`to_dict` gives; options without a value keep their defaults.

    Args:
        kind: the class of the options.
        values: the values by the names of their fields; a section is a dictionary of its own.

    Raises:
        ValueError: a name is unknown, or a value is out of its bounds.
    """
    options: T = from_leaves(kind, dict(stated(kind, values)))
    return options


def stated(kind: type[OptionSet], values: Mapping[str, Any], where: str = "") -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and the value of every option among values that come from YAML or JSON.

    Args:
        kind: the class of the options.
        values: the values by key; a section is a dictionary of its own, or empty.
        where: the beginning of error messages, such as the name of the file.

    Raises:
        ValueError: an option is unknown or was renamed, or a value is of another kind.
    """
    known = {leaf.key: leaf for leaf in leaves(kind)}
    foreign = {key for key, leaf in known.items() if leaf.kind is dict}
    sections = {key.rpartition(".")[0] for key in known} | foreign
    for given, value in values.items():
        name = kind.aliases.get(given, given)
        section, _, key = name.partition(".")
        if name in kind.renamed:
            raise ValueError(f"{where}there is no option {name}: {kind.renamed[name]}")
        if name in sections:
            if value and not isinstance(value, Mapping):
                raise ValueError(f"{where}{name} is a section of options, not a value: got {value!r}")
            yield from stated(kind, {f"{name}.{key}": one for key, one in (value or {}).items()}, where)
        elif section in foreign:
            try:
                meant = typed(value)
            except RecursionError:
                raise ValueError(f"{where}{name} is nested too deeply") from None
            yield (*known[section].path, key), meant
        elif name in known:
            yield known[name].path, read_value(known[name], value, f"{where}{name}")
        else:
            raise ValueError(f"{where}unknown option {name!r}.{did_you_mean(str(name), known)}")


def typed(value: Any) -> Any:
    """Return the value that a text means in YAML; unlike YAML 1.1, 2e-4 is a number.

    >>> typed("2e-4"), typed("[1, yes]"), typed("32k")
    (0.0002, [1, True], '32k')
    """
    if isinstance(value, Mapping):
        return {key: typed(one) for key, one in value.items()}
    if isinstance(value, list):
        return [typed(one) for one in value]
    if not isinstance(value, str):
        return value
    try:
        meant = yaml.safe_load(value)
    except yaml.YAMLError:
        return value
    if isinstance(meant, str):
        with contextlib.suppress(ValueError):
            return float(meant)
    return meant


def read_value(option: Option, value: Any, where: str) -> Any:
    """Return the value of an option, read from text if it is given as text.

    Raises:
        ValueError: the text is no value of the option; the message begins with ``where``.
    """
    if isinstance(value, str):
        listed = value.startswith("[") and value.endswith("]")  # as in YAML
        if option.several or (option.repeated and listed):
            value = value.strip("[]").replace(",", " ").split()
        elif option.repeated:
            value = [value]
    try:
        return option.value_of(value)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def to_dict(options: OptionSet) -> dict[str, Any]:
    """Return options as YAML and JSON values by the names of their fields; a section is a dictionary of its own."""
    values: dict[str, Any] = {}
    for leaf in leaves(type(options)):
        value: Any = functools.reduce(getattr, leaf.path, options)
        if leaf.unit == "s" and value is not None:
            value = f"{value}s"  # as a time is typed, such as 90s
        if isinstance(value, tuple):
            value = list(value)
        elif isinstance(value, Path):
            value = str(value)
        section, _, name = leaf.key.rpartition(".")
        if section:
            values.setdefault(section, {})[name] = value
        else:
            values[name] = value
    return values


def to_yaml(options: OptionSet) -> str:
    """Return options as YAML."""
    return str(yaml.safe_dump(to_dict(options), sort_keys=False, allow_unicode=True))
