"""Turns the words of a command line into options: argparse divides them, and YAML files give further values."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml

from rope_patch.options.fields import Option, OptionSet, from_leaves, leaves
from rope_patch.options.yaml_and_json import read_value, stated
from rope_patch.runtime.text import did_you_mean

T = TypeVar("T", bound=OptionSet)


class UsageError(ValueError):
    """The words of a command line cannot be read as options; the message is one line."""


def parse_words(kind: type[T], words: Sequence[str]) -> T:
    """Return the options that the words of a command line state.

    If the options have a field ``config``, its YAML files and words ``key=value`` apply in the order in which they
    stand, and flags after them; later values replace earlier ones. Modules of ``--import`` are imported first, since
    checks of values may need what they define. With ``--help`` the help is printed, and the process ends.

    Args:
        kind: the class of the options; its docstring is the text above the help.
        words: the words of the command line that follow the name of the command.

    Raises:
        UsageError: an option is unknown or missing, or a word is no value of its option.
        ValueError: a value is out of its bounds, or a file holds no options.
    """
    known = list(leaves(kind))
    written, rest = _divided(kind, known, words)
    sources = [str(word) for word in written.pop(("config",), ())]
    for word in rest:
        if word.startswith("-"):
            # --force is for those who ask for it.
            flags = [flag for leaf in known for flag in (leaf.flag, *leaf.short) if leaf.name != "force"]
            hint = did_you_mean(word, flags)
            if not hint and any(leaf.name == "parameters" for leaf in known):
                hint = " Parameters of a method are written without dashes, as in factor=4."
            raise UsageError(f"unknown option {word}.{hint} rope-patch {kind.command} --help lists them")
        hint = ""
        if any(leaf.several for leaf in known):
            hint = ": several values go into quotes, as in --methods 'yarn ntk'"
        raise UsageError(f"unexpected argument {word!r}{hint}")
    if modules := written.get(("imports",)):
        from rope_patch.registry import import_modules

        import_modules(modules)
    # Flags come last, and replace values of files.
    values = {path: value for word in sources for path, value in _stated(word, kind)} | written
    missing = []
    for leaf in known:
        if leaf.default is MISSING and leaf.path not in values:
            name = f"{leaf.flag} {leaf.metavar}"
            if leaf.positional:
                name = leaf.flag
            elif any(option.path == ("config",) and option.positional for option in known):  # as the pages write them
                name = f"{leaf.key}={leaf.metavar}"
            missing.append(name)
        missing += [f"{leaf.key}.{key}" for key in leaf.needs if (*leaf.path, key.split("=")[0]) not in values]
    if missing:
        raise UsageError(f"missing {', '.join(missing)}: rope-patch {kind.command} --help says what is needed")
    options: T = from_leaves(kind, values)
    return options


def described(kind: type[OptionSet]) -> str:
    """Return the docstring of options as plain text for the terminal."""
    width = min(shutil.get_terminal_size().columns, 120)
    paragraphs = re.split(r"\n\s*\n", (kind.__doc__ or "").strip().replace("``", ""))
    return "\n\n".join(textwrap.fill(" ".join(one.split()), width) for one in paragraphs)


# --- words -----------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are exceptions; :func:`parse_words` checks which options are required."""

    def error(self, message: str) -> NoReturn:
        """Raise :class:`UsageError`, where argparse would end the process."""
        raise UsageError(re.sub(r"argument (?:.*/)?(\S+): expected one argument", r"\1 needs a value", message))


class _Once(argparse.Action):
    """Store the value of an option, which may be given once."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        """Raise UsageError if the option has a value already, which would be dropped."""
        if hasattr(namespace, self.dest):
            raise UsageError(f"{option_string} is given twice: give it once, and several values in one pair of quotes")
        setattr(namespace, self.dest, values)


def _divided(
    kind: type[OptionSet], known: Sequence[Option], words: Sequence[str]
) -> tuple[dict[tuple[str, ...], Any], list[str]]:
    """Return the values that words give to options, by the path of the option, and the words that belong to none."""
    usage = ["rope-patch", kind.command, "[options]"]
    for leaf in known:
        if leaf.positional:
            name = f"{leaf.flag} ..." if leaf.repeated else leaf.flag
            usage.append(name if leaf.default is MISSING else f"[{name}]")
    parser = _Parser(
        usage=" ".join(usage),
        description=described(kind),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    # argparse takes -16k for an option, unlike -16: then it would say that the option before has no value.
    parser._negative_number_matcher = re.compile("-[0-9.]")
    for i, option in enumerate(known):
        if option.kind is dict:
            continue
        hint = ""
        if option.shown:
            hint = f" (default: {option.shown})"
        elif option.default is MISSING:
            hint = " (required)"
        # argparse formats the help with %, so a percent sign is doubled.
        more: dict[str, Any] = {"help": option.help.replace("%", "%%") + hint}
        if option.kind is not bool:
            more["metavar"] = option.metavar
        elif option.default:
            more["action"] = argparse.BooleanOptionalAction
        else:
            more["action"] = "store_true"
        if option.positional:
            # Optional for argparse, since a value may also come from a file.
            parser.add_argument(str(i), nargs="*" if option.repeated else "?", **more)
            continue
        if option.repeated:
            more["action"] = "append"
        elif option.kind is not bool:
            more["action"] = _Once
        parser.add_argument(*option.short, f"--{option.name}", dest=str(i), **more)
    # Intermixed, so that positional words may stand between flags.
    parsed, rest = parser.parse_known_intermixed_args(words)
    values: dict[tuple[str, ...], Any] = {}
    for name, value in vars(parsed).items():
        option = known[int(name)]
        values[option.path] = None if value == "null" else read_value(option, value, option.flag)
    return values, rest


# --- files -----------------------------------------------------------------------------------------------------------


class _Words(yaml.BaseLoader):  # type: ignore[misc]
    """A loader that keeps each value but null as text, so that off and 1e-5 mean the same as on the command line."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Return a mapping, each of whose keys stands once."""
        names = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if names.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is stated twice", key.start_mark)
        return super().construct_mapping(node, deep)


# BaseLoader knows no type but text, so null is added.
_Words.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:~|null|)$"), ["~", "n", ""])
_Words.add_constructor("tag:yaml.org,2002:null", lambda *_: None)


def _stated(word: str, kind: type[OptionSet]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the options that a YAML file or a word ``key=value`` states, with their values.

    Raises:
        ValueError: a file is not YAML, an option is not known, or a value is wrong.
        OSError: there is no such file.
    """
    name, equals, text = word.partition("=")
    if equals:
        return stated(kind, {name: None if text == "null" else text})
    try:
        values = yaml.load(Path(word).read_text(encoding="utf-8"), _Words)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{word} is no YAML: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{word} must hold options of the form name: value")
    return stated(kind, values, f"{word}: ")
