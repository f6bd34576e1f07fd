"""Options as YAML files, which a command reads again."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rope_patch.options.fields import Leaf, OptionSet, leaves


def to_dict(options: OptionSet) -> dict[str, Any]:
    """Return options as YAML and JSON values by the names of their fields; a section is a dictionary of its own."""
    values: dict[str, Any] = {}
    for leaf, value in _values(options):
        section = values.setdefault(leaf.path[0], {}) if "." in leaf.name else values
        section[leaf.path[-1]] = value
    return values


def to_yaml(options: OptionSet, *, width: int = 120) -> str:
    """Return options as YAML, the help of each in a comment beside it, or above it where it is long.

    Args:
        options: the values.
        width: longest line of a comment [characters].
    """
    lines, section = list[str](), ""
    for leaf, value in _values(options):
        inside = "." in leaf.name
        if inside and leaf.path[0] != section:
            section = leaf.path[0]
            lines += ["", f"{section}:"]
        indent = "  " * inside
        stated = yaml.safe_dump([value], default_flow_style=True, width=10**6, allow_unicode=True)[1:-2]
        line = f"{indent}{leaf.path[-1]}: {stated}"
        beside = f"{line:<32}# {leaf.option.help}"
        above = textwrap.wrap(leaf.option.help, width, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        lines += [beside] if len(beside) <= width else [*above, line]
    return "\n".join(lines) + "\n"


def _values(options: OptionSet) -> Iterator[tuple[Leaf, Any]]:
    """Yield every option with its value, as YAML has it."""
    for leaf in leaves(type(options)):
        value = functools.reduce(getattr, leaf.path, options)
        yield leaf, [*value] if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
