"""Options of the recipe from YAML files and ``key=value`` overrides."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from rope_patch.runtime.text import did_you_mean
from rope_patch.training.recipe import RecipeOptions, flatten

SECTIONS: dict[str, Any] = {f.name: f.default_factory for f in dataclasses.fields(RecipeOptions) if f.name != "output"}

TEXT_OPTIONS = {
    "output",
    *(
        f"{name}.{key}"
        for name, section in SECTIONS.items()
        for key, hint in get_type_hints(section).items()
        if hint in (str, str | None)
    ),
}
"""Options whose value is text even if YAML would read a number: a revision may be all digits."""

REQUIRED = {
    "model.name": "the checkpoint to train, such as model.name=FOLDER",
    "data.lengths": "the length of the rows to train on [tokens], such as data.lengths=32k",
    "output": "the folder to write, such as output=FOLDER",
}
"""What each option without a default stands for."""


def read(
    files: Sequence[str | Path] = (), overrides: Sequence[str] = (), base: dict[str, Any] | None = None
) -> RecipeOptions:
    """Return the options of YAML files, each over those before it, then of ``key=value`` overrides.

    Args:
        files: YAML files; relative paths in them are relative to the working directory, not to the file.
        overrides: such as ``train.steps=100``.
        base: nested values in place of the defaults.

    Raises:
        FileNotFoundError: no such file.
        ValueError: an unknown key (the nearest known one is named), a value of the wrong type or out of range, or a
            missing one.

    Example:
        >>> options = read(overrides=["model.name=llama", "data.lengths=1k", "output=out", "patch.method=pi:factor=4"])
        >>> options.target_length, options.train.steps
        (1024, 500)
        >>> read(overrides=["train.stepps=3"])
        Traceback (most recent call last):
        ...
        ValueError: unknown option 'train.stepps'. Did you mean 'train.steps'? Known in train: steps, batch, ...
    """
    merged: Any = OmegaConf.structured(RecipeOptions)
    for layer, origin in _layers(files, overrides, base):
        try:
            merged = OmegaConf.merge(merged, OmegaConf.create(_checked(layer, origin)))
        except ConfigKeyError as error:
            raise ValueError(f"{origin}{_unknown(str(error.full_key))}") from None
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            if "is not a ListConfig" in reason:
                reason = "it must be a list, such as [0.1, 0.5] or [full_attention]"
            raise ValueError(f"{origin}{error.full_key}: {reason}") from None
    for name in sorted(OmegaConf.missing_keys(merged)):
        raise ValueError(f"{name} is required: give {REQUIRED[name]}, here or in a YAML file")
    return OmegaConf.to_object(merged)  # type: ignore[return-value]


def _layers(files: Sequence[str | Path], overrides: Sequence[str], base: Any) -> Iterator[tuple[dict[Any, Any], str]]:
    """Yield nested values, later ones over earlier ones, with the text that an error about them begins with."""
    if base:
        yield base, ""
    for file in files:
        if not Path(file).is_file():
            raise FileNotFoundError(f"no config file {str(file)!r}")
        try:
            loaded = OmegaConf.load(file)
        except Exception as error:  # of the YAML parser, whose message says line and column
            raise ValueError(f"{file} is no YAML: {' '.join(str(error).split())}") from None
        if not OmegaConf.is_dict(loaded):
            raise ValueError(f"{file} holds no options: expected sections such as 'model:'")
        yield OmegaConf.to_container(loaded, resolve=False), f"{file}: "  # type: ignore[misc]
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise ValueError(f"expected key=value or a .yaml file, got {override!r}")
        section, _, last = name.rpartition(".")
        if name in TEXT_OPTIONS and text not in ("null", ""):
            yield ({section: {last: text}} if section else {last: text}), ""
            continue
        try:
            parsed = OmegaConf.from_dotlist([override])
        except Exception as error:
            raise ValueError(f"{name}: no YAML value: {' '.join(str(error).split())}") from None
        yield OmegaConf.to_container(parsed, resolve=False), ""  # type: ignore[misc]


def _checked(layer: dict[Any, Any], origin: str) -> dict[Any, Any]:
    """Return a layer without its empty sections; refuse a value in the place of a section or of text."""
    sections = {name: value for name, value in layer.items() if value is not None or name not in SECTIONS}
    for name, value in sections.items():
        if name in SECTIONS and not isinstance(value, dict):
            raise ValueError(f"{origin}{name} is a section of options, not a value: got {value!r}")
    for name, value in flatten(sections):
        if name in TEXT_OPTIONS and isinstance(value, bool | float):
            raise ValueError(f"{origin}{name} must be text, and YAML reads {value!r} here: put it in quotes")
    return sections


def _unknown(key: str) -> str:
    section, _, _ = key.rpartition(".")
    known = [f.name for f in dataclasses.fields(SECTIONS.get(section, RecipeOptions))]
    everywhere = [f"{name}.{f.name}" for name, kind in SECTIONS.items() for f in dataclasses.fields(kind)]
    nearest = did_you_mean(key, [*everywhere, "output"])
    return f"unknown option {key!r}.{nearest} Known in {section or 'the file'}: {', '.join(known)}"
