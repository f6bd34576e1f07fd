"""From words of the command line to options: tyro divides the words, and files of options fill what is left open."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import yaml

from rope_patch.options.fields import Leaf, Option, OptionSet, build, leaves
from rope_patch.options.writing import read_value, stated
from rope_patch.runtime.text import did_you_mean

T = TypeVar("T", bound=OptionSet)


class UsageError(ValueError):
    """Words of the command line that are no options; the message is one line."""


def parse(kind: type[T], words: Sequence[str]) -> T:
    """Return the options that the words of a command line state; see :func:`parse_given`."""
    return parse_given(kind, words)[0]


def parse_given(kind: type[T], words: Sequence[str]) -> tuple[T, frozenset[str]]:
    """Return the options that the words of a command line state, and the names of those that were written.

    Where the options have a field ``config``, its YAML files apply in their order, a later one over an earlier, then
    words ``key=value``, then flags. A positional ``config`` holds both, in the order in which they stand. Modules of
    ``--import`` are imported, since checks of values may ask for what they define. With ``--help`` the help is printed,
    and the process ends.

    Args:
        kind: the class of the options; its docstring is the text above the help.
        words: of the command line, behind the name of the command.

    Raises:
        UsageError: an unknown option, a missing one, or a word that is no value of its option.
        ValueError: a value out of its bounds, or a file that holds no options.
    """
    known = list(leaves(kind))
    written, rest = _divided(kind, known, words)
    by_name = {leaf.key: leaf for leaf in known}
    sources = [str(word) for word in written.pop(("config",), ())]
    if config := by_name.get("config"):
        arguments = [str(written.pop(leaf.path)) for leaf in known if _is_key(leaf, written.get(leaf.path))]
        free = [word for word in rest if not word.startswith("-")]
        sources += [*arguments, *(word for word in free if config.option.positional or "=" in word)]
    for word in rest:
        if word.startswith("-"):
            flags = [flag for leaf in known for flag in (leaf.flag, *leaf.option.short)]
            raise UsageError(f"unknown option {word}.{did_you_mean(word, flags)}")
        if word not in sources:
            raise UsageError(f"unexpected argument {word!r}")
    if modules := written.get(("imports",)):
        from rope_patch.registry import import_modules

        import_modules(modules)
    values = {path: value for word in sources for path, value in _stated(word, by_name)} | written
    missing = [leaf.flag for leaf in known if leaf.default is MISSING and leaf.path not in values]
    if missing:
        raise UsageError(f"missing {', '.join(missing)}: rope-patch {kind.command} --help says what is needed")
    options: T = build(kind, values)
    return options, frozenset(path[-1] for path in values)


def _is_key(leaf: Leaf, value: Any) -> bool:
    """Return whether ``key=value`` stands where an argument is left out."""
    return leaf.option.positional and isinstance(value, str) and re.match(r"[\w.]+=", value) is not None


def described(kind: type[OptionSet]) -> str:
    """Return the docstring of options as plain text for the terminal."""
    width = min(shutil.get_terminal_size().columns, 120)
    paragraphs = re.split(r"\n\s*\n", (kind.__doc__ or "").strip().replace("``", ""))
    return "\n\n".join(textwrap.fill(" ".join(one.split()), width) for one in paragraphs)


# --- tyro ------------------------------------------------------------------------------------------------------------


def _divided(
    kind: type[OptionSet], known: Sequence[Leaf], words: Sequence[str]
) -> tuple[dict[tuple[str, ...], Any], list[str]]:
    """Return the values that words give to options, by the path of each, and the words that belong to none."""
    import tyro
    from tyro import _errors  # the only way to an error in one line of our own
    from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

    registry = ConstructorRegistry()

    @registry.struct_rule
    def _(info: StructTypeInfo) -> StructConstructorSpec | None:
        if info.type is not kind:
            return None
        return StructConstructorSpec(dict, tuple(_tyro_field(f"option{i}", leaf) for i, leaf in enumerate(known)))

    def refuse(event: Any) -> NoReturn:
        raise UsageError(f"{event.argument.lowered.name_or_flags[-1]} needs a value")

    if {"-h", "--help"} & {*words}:
        print(described(kind), end="\n\n")  # tyro would join its lines
    with _errors.on_parse_error(refuse):
        found, rest = tyro.cli(
            kind,
            registry=registry,
            args=words,
            prog=f"rope-patch {kind.command}",
            description="",
            return_unknown_args=True,
        )
    values: dict[tuple[str, ...], Any] = {}
    for leaf, value in zip(known, dict(found).values(), strict=True):  # type: ignore[call-overload]
        if leaf.option.kind is bool and value != leaf.default:
            values[leaf.path] = value
        elif leaf.option.kind is not bool and value:
            given = list(value) if leaf.option.repeated else None if value[0] == "null" else value[0]
            values[leaf.path] = read_value(leaf.option, given, leaf.flag)
    return values, rest


def _tyro_field(name: str, leaf: Leaf) -> Any:
    """Return an option as tyro takes it: a flag, or words that are read afterwards."""
    import tyro
    from tyro.constructors import PrimitiveConstructorSpec, StructFieldSpec

    option, required = leaf.option, leaf.default is MISSING
    hint = "(required)" if required else f"(default: {leaf.shown})" if leaf.shown else ""
    metavar: str | None = option.metavar
    annotations: list[Any] = []
    kind: Any = str | None
    default: Any = None
    if option.positional:
        annotations.append(tyro.conf.Positional)
        metavar = metavar if required else f"[{metavar}]" + "..." * option.repeated
    if option.kind is bool:
        annotations += [] if leaf.default else [tyro.conf.FlagCreatePairsOff]
        kind, default, metavar = bool, leaf.default, None
    elif option.repeated:
        annotations += [] if option.positional else [tyro.conf.UseAppendAction]
        kind, default = tuple[str, ...], ()
    else:
        annotations.append(
            PrimitiveConstructorSpec(
                1, option.metavar, tuple, is_instance=lambda _: True, str_from_instance=lambda _: []
            )
        )
    annotations.append(
        tyro.conf.arg(name=leaf.name, metavar=metavar, help_behavior_hint=hint, aliases=option.short or None)
    )
    return StructFieldSpec(name, Annotated[(kind, *annotations)], default, option.help)  # type: ignore[arg-type]


# --- values ----------------------------------------------------------------------------------------------------------


def _stated(word: str, known: Mapping[str, Leaf]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the options that a YAML file or a word ``key=value`` states, with their values.

    Raises:
        ValueError: a file that is no YAML, an option that is not known, or a wrong value.
        OSError: no such file.
    """
    name, equals, text = word.partition("=")
    if equals:
        return stated(known, {name: _value(known[name].option, text) if name in known else text})
    try:
        values = yaml.safe_load(Path(word).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{word} is no YAML: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{word} must hold options of the form name: value")
    return stated(known, values, f"{word}: ")


def _value(option: Option, text: str) -> Any:
    """Return what stands behind ``key=``: ``null`` is None, and lists and truth values are written as in YAML."""
    if text == "null":
        return None
    if option.kind is bool or (text[:1] == "[" and (option.several or option.repeated)):
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            return text  # which the option refuses
    return text
