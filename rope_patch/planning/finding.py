"""Find the shape of a model by name: the shapes of common models ship as JSON, which needs neither torch nor models."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_patch.packaged import data_path
from rope_patch.planning.shapes import Shape
from rope_patch.runtime.text import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SAME_SHAPE = re.compile(r"^meta-|-(instruct|base|text|it|pt)$")


def shape_of(model: str | Path | PreTrainedModel | Shape) -> Shape:
    """Return the shape of a model.

    Args:
        model: a shipped name (``Llama-3.1-8B``, with or without its organisation, in any case), whose shape is read
            from a file of this package; a checkpoint folder, a hub id or a GGUF file, of which the config is read; a
            model; or a shape, which is returned as it is.

    Raises:
        TypeError: none of these.
        ValueError: unknown name, no such folder, or not a dense decoder of attention and MLP.
        OSError: nothing that can be loaded, or no such repository.
    """
    if isinstance(model, Shape):
        return model
    if not isinstance(model, str | Path):
        from rope_patch.planning.reading import read_model

        return read_model(model)
    name = _shipped_name(str(model))
    return _from_outside(str(model)) if name is None else Shape.from_dict(_shapes()[name]["shape"])


def shipped() -> list[str]:
    """Return the names of the models whose shapes ship with the package."""
    return list(_shapes())


@functools.cache
def _shapes() -> dict[str, dict[str, Any]]:
    """Repository and shape of each model, by name."""
    data: dict[str, dict[str, Any]] = json.loads((data_path("assets") / "shapes.json").read_text(encoding="utf-8"))
    return data


def _shipped_name(name: str) -> str | None:
    if Path(name).is_dir():
        return None
    organisation, _, short = name.lower().rpartition("/")
    while short != (stripped := _SAME_SHAPE.sub("", short)):
        short = stripped
    for known, entry in _shapes().items():
        if known.lower() == short and organisation in ("", entry["repository"].lower().partition("/")[0]):
            return known
    return None


def _from_outside(name: str) -> Shape:
    known = {stem.lower(): stem for stem in shipped()}
    hint = did_you_mean(name.rpartition("/")[2].lower(), known)
    hint = re.sub(r"'(.+)'", lambda near: repr(known[near[1]]), hint)
    if not Path(name).is_dir() and "/" not in name:
        raise ValueError(f"unknown model {name!r}.{hint} Give a folder, a hub id, or one of {', '.join(shipped())}")
    from rope_patch.planning.reading import read_checkpoint

    try:
        return read_checkpoint(name)
    except OSError as error:
        raise OSError(f"{error}{hint}") from error
