"""From words of the command line to options: YAML files and ``key=value`` words become arguments, then tyro reads."""

from __future__ import annotations

import itertools
import re
import shutil
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import yaml

from rope_patch.options.fields import Leaf, OptionSet, build, leaves
from rope_patch.words import did_you_mean

T = TypeVar("T", bound=OptionSet)


class UsageError(ValueError):
    """Words of the command line that are no options; the message is one line."""


def parse(kind: type[T], words: Sequence[str]) -> T:
    """Return the options that the words of a command line state; see :func:`parse_given`."""
    return parse_given(kind, words)[0]


def parse_given(kind: type[T], words: Sequence[str]) -> tuple[T, frozenset[str]]:
    """Return the options that the words of a command line state, and the names of those that were written.

    Modules of ``--import`` are imported first, since values may name what they define. With ``--help`` the help is
    printed, and the process ends.

    Args:
        kind: the class of the options; its docstring is the text above the help.
        words: of the command line, behind the name of the command.

    Raises:
        UsageError: an unknown option, a missing one, or a word that is no value of its option.
        ValueError: a value out of its bounds, or a file that holds no options.
    """
    import tyro
    from tyro import _errors  # the only way to errors in one line of our own; the version is pinned
    from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

    named = {f"option{i}": leaf for i, leaf in enumerate(leaves(kind))}
    words = flattened(list(named.values()), words)
    _import_modules(words)
    registry = ConstructorRegistry()

    @registry.struct_rule
    def _(info: StructTypeInfo) -> StructConstructorSpec | None:
        if info.type is not kind:
            return None
        return StructConstructorSpec(dict, tuple(_tyro_field(name, leaf) for name, leaf in named.items()))

    def refuse(event: _errors.ParseErrorEvent) -> NoReturn:
        raise UsageError(_message(event, list(named.values()))) from None

    if {"-h", "--help"} & set(words):
        print(described(kind), end="\n\n")  # tyro would join its lines
    with _errors.on_parse_error(refuse):
        parsed: Any = tyro.cli(kind, registry=registry, args=words, prog=f"rope-patch {kind.command}", description="")
    values: dict[tuple[str, ...], Any] = {}
    for name, value in parsed.items():
        leaf = named[name]
        if leaf.option.kind is bool or leaf.option.repeated:
            values |= {leaf.path: value} if value not in (leaf.default, ()) else {}
        elif value is not None:
            values[leaf.path] = value[0]
    options: T = build(kind, values)
    return options, frozenset(path[-1] for path in values)


def described(kind: type[OptionSet]) -> str:
    """Return the docstring of options as plain text for the terminal."""
    paragraphs = re.split(r"\n\s*\n", (kind.__doc__ or "").strip())
    width = min(shutil.get_terminal_size().columns, 120)
    return "\n\n".join(textwrap.fill(" ".join(one.replace("``", "").split()), width) for one in paragraphs)


def _import_modules(words: Sequence[str]) -> None:
    """Import the modules that ``--import`` names."""
    if modules := [word for before, word in itertools.pairwise(words) if before == "--import"]:
        from rope_patch.evaluation.importing import import_modules

        import_modules(modules)


# --- to and from tyro ------------------------------------------------------------------------------------------------


def _tyro_field(name: str, leaf: Leaf) -> Any:
    """Return an option as tyro takes it."""
    import tyro
    from tyro.constructors import PrimitiveConstructorSpec, StructFieldSpec

    option = leaf.option
    hint = "(required)" if leaf.default is MISSING else f"(default: {leaf.shown})" if leaf.shown else ""
    what: dict[str, Any] = {"help_behavior_hint": hint, "aliases": option.short or None, "metavar": option.metavar}
    annotations: list[Any] = []
    kind: Any = str | None
    default: Any = None
    if option.positional:
        annotations.append(tyro.conf.Positional)
        what["aliases"] = None
        what["metavar"] = option.metavar if leaf.default is MISSING else f"[{option.metavar}]" + "..." * option.repeated
    if option.kind is bool:
        annotations += [] if leaf.default else [tyro.conf.FlagCreatePairsOff]
        kind, default, what["metavar"] = bool, leaf.default, None
    elif option.repeated:
        annotations += [] if option.positional else [tyro.conf.UseAppendAction]
        kind, default = tuple[str, ...], ()
    else:
        annotations.append(
            PrimitiveConstructorSpec(
                nargs=1,
                metavar=option.metavar,
                # In a tuple, since None stands for an option that was not written, and the word null means None too.
                instance_from_str=lambda words: (option.read_word(words[0]),),
                is_instance=lambda value: True,
                str_from_instance=lambda value: [str(value)],
            )
        )
    if leaf.default is MISSING:
        default = tyro.MISSING_NONPROP
    annotations.append(tyro.conf.arg(name=leaf.name, **what))
    return StructFieldSpec(name, Annotated[(kind, *annotations)], default, option.help)  # type: ignore[arg-type]


def _message(event: Any, known: Sequence[Leaf]) -> str:
    """Return in one line what is wrong with a command line."""
    by_flag = {flag for leaf in known for flag in (leaf.flag, *leaf.option.short)}
    match type(event).__name__:
        case "UnrecognizedArgs":
            word = next((word for word in event.tokens if word.startswith("-")), event.tokens[0])
            if not word.startswith("-"):
                return f"unexpected argument {word!r}"
            return f"unknown option {word}.{did_you_mean(word, by_flag)}"
        case "MissingArgs":
            names = [_written(one.arg) for one in event.missing_arguments]
            unknown = [word for word in event.unrecognized_tokens if word.startswith("-")]
            more = f"; unknown option {unknown[0]}.{did_you_mean(unknown[0], by_flag)}" if unknown else ""
            return f"missing {', '.join(names)}: {event.prog} --help says what is needed{more}"
        case "BadValue":
            return f"{_written(event.argument)} needs a value"
        case "InstantiationFailure" if event.argument is not None:
            return f"{_written(event.argument)}: {event.message}"
    return str(getattr(event, "message", type(event).__name__))


def _written(argument: Any) -> str:
    """Return how an argument of tyro is written: ``--chunk``, ``MODEL``."""
    return str(argument.lowered.metavar if argument.is_positional() else argument.lowered.name_or_flags[-1])


# --- YAML files and key=value ----------------------------------------------------------------------------------------


def flattened(known: Sequence[Leaf], words: Sequence[str]) -> list[str]:
    """Return a command line with its files of options and ``key=value`` words turned into arguments.

    Words such as ``--chunk=8k`` become two. Files and ``key=value`` are read where an option named ``config`` is among
    those known: they apply in their order, a later one over an earlier, and what is written as a flag over both.

    Args:
        known: all options of the command.
        words: of the command line.

    Raises:
        ValueError: a file that is no YAML, or an option that is not known.
    """
    takes_value = {flag for leaf in known if leaf.option.kind is not bool for flag in (leaf.flag, *leaf.option.short)}
    words = [part for word in words for part in _parted(word, takes_value)]
    files = next((leaf for leaf in known if leaf.name == "config"), None)
    if files is None:
        return words
    by_name = {name: leaf for leaf in known for name in (leaf.name.replace("-", "_"), ".".join(_yaml_path(leaf)))}
    values: dict[str, Any] = {}
    flags, arguments, before = list[str](), list[str](), ""
    for word in words:
        is_value = before in takes_value
        name, equals, value = word.partition("=")
        if word.endswith((".yaml", ".yml")) and files.option.positional and not (is_value or equals):
            values |= read_yaml(Path(word), by_name)
        elif before in (files.flag, *files.option.short):
            values |= read_yaml(Path(word), by_name)
            flags.pop()
        elif is_value or word.startswith("-"):
            flags.append(word)
        elif equals and re.fullmatch(r"[\w.]+", name):
            if name not in by_name:
                raise UsageError(f"unknown option {name}.{did_you_mean(name, by_name)}")
            values[name] = yaml.safe_load(value) if value.startswith("[") else value
        else:
            arguments.append(word)
        before = "" if is_value else word
    stated = [word for name, value in values.items() for word in _argument(by_name[name], value, bool(arguments))]
    return [*arguments, *stated, *flags]


def _parted(word: str, takes_value: Collection[str]) -> list[str]:
    """Return ``--chunk=8k`` as two words, and others as they are."""
    name, equals, value = word.partition("=")
    return [name, value] if equals and name in takes_value else [word]


def _yaml_path(leaf: Leaf) -> tuple[str, ...]:
    """Return the names that lead to an option in a YAML file: a section and a field, or a field alone."""
    return leaf.path if "." in leaf.name else leaf.path[-1:]


def read_yaml(path: Path, known: dict[str, Leaf]) -> dict[str, Any]:
    """Return what a file states of options, by their names; those of a section as ``section.name``.

    Raises:
        ValueError: no YAML, or a name that is no option.
        OSError: no such file.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold options of the form name: value")
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        flat |= {f"{name}.{key}" if key else str(name): one for key, one in inner}
    for name in flat:
        if name not in known:
            raise ValueError(f"{path}: unknown option {name!r}.{did_you_mean(name, known)}")
    return flat


def _argument(leaf: Leaf, value: Any, has_arguments: bool) -> list[str]:
    """Return an option of a file as words of the command line."""
    option = leaf.option
    if option.kind is bool:
        on = option.read(str(value))
        return [leaf.flag] if on and not leaf.default else [f"--no-{leaf.name}"] if leaf.default and not on else []
    if value is None:
        words = ["null"]
    elif isinstance(value, bool):  # YAML reads the words on and off so
        words = ["on" if value else "off"]
    elif isinstance(value, list | tuple):
        words = [" ".join(map(str, value))] if option.several else [*map(str, value)]
    else:
        words = [str(value)]
    if option.positional:
        return [] if has_arguments else words
    return [part for word in words for part in (leaf.flag, word)]
