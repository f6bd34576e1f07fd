"""Options as values of YAML and JSON, and back."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from rope_patch.options.fields import Leaf, OptionSet, build, leaves
from rope_patch.runtime.text import did_you_mean

T = TypeVar("T", bound=OptionSet)


def from_dict(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return options of the values that :func:`to_dict` gives; those that are left out keep their defaults.

    Args:
        kind: the class of the options.
        values: by the names of their fields; a section is a dictionary of its own.

    Raises:
        ValueError: an unknown name, or a value out of its bounds.
    """
    paths, found = {leaf.key: leaf.path for leaf in leaves(kind)}, {}
    for name, value in values.items():
        inside = {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, Mapping) else {name: value}
        for key, one in inside.items():
            if key not in paths:
                raise ValueError(f"unknown option {key!r}.{did_you_mean(key, paths)}")
            found[paths[key]] = one
    options: T = build(kind, found)
    return options


def to_dict(options: OptionSet) -> dict[str, Any]:
    """Return options as YAML and JSON values by the names of their fields; a section is a dictionary of its own."""
    values: dict[str, Any] = {}
    for leaf, value in _values(options):
        section, _, name = leaf.key.rpartition(".")
        (values.setdefault(section, {}) if section else values)[name] = value
    return values


def to_yaml(options: OptionSet, *, width: int = 120) -> str:
    """Return options as YAML, the help of each in a comment beside it, or above it where it is long.

    Args:
        options: the values.
        width: longest line of a comment [characters].
    """
    lines, section = list[str](), ""
    for leaf, value in _values(options):
        own, _, name = leaf.key.rpartition(".")
        if own and own != section:
            section = own
            lines += ["", f"{section}:"]
        indent = "  " if own else ""
        stated = yaml.safe_dump([value], default_flow_style=True, width=10**6, allow_unicode=True)[1:-2]
        line = f"{indent}{name}: {stated}"
        beside = f"{line:<32}# {leaf.option.help}"
        above = textwrap.wrap(leaf.option.help, width, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        lines += [beside] if len(beside) <= width else [*above, line]
    return "\n".join(lines) + "\n"


def _values(options: OptionSet) -> Iterator[tuple[Leaf, Any]]:
    """Yield every option with its value, as YAML has it."""
    for leaf in leaves(type(options)):
        value = functools.reduce(getattr, leaf.path, options)
        yield leaf, [*value] if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
