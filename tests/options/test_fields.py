"""An option is declared once: bounds, help and words of the command line follow from its field."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from rope_patch.options import COMMANDS
from rope_patch.options.fields import (
    OptionSet,
    contained,
    flag,
    from_leaves,
    leaves,
    number,
    path,
    tokens,
    whole,
    word,
)
from rope_patch.options.yaml_and_json import to_dict, to_yaml


@dataclass(frozen=True)
class Inner(OptionSet):
    lengths: tuple[int, ...] = tokens("Lengths.", several=True)
    depths: tuple[float, ...] = number("Depths.", (0.0, 1.0), several=True, least=0, most=1)
    chunk: int | None = tokens("Chunk.", None)


@dataclass(frozen=True)
class Outer(OptionSet):
    model: str = word("The model.", metavar="MODEL", positional=True)
    inner: Inner = contained(Inner, without=("chunk",), depths=(0.5,))
    section: Inner = contained(Inner, section=True, lengths=(64,))
    output: Path = path("The folder.", Path("out"), short=("-o",))
    kinds: tuple[str, ...] = word("Kinds.", (), name="kind", repeated=True)
    samples: int = whole("Samples.", 4, least=1)
    mode: str = word("Mode.", "on", choices=("on", "off"))
    report: bool = flag("Report.", True)


def test_the_options_of_a_class_are_its_own_and_those_that_it_contains():
    named = {leaf.flag: leaf for leaf in leaves(Outer)}
    assert [*named] == [
        "MODEL",
        "--lengths",
        "--depths",
        "--section.lengths",
        "--section.depths",
        "--section.chunk",
        "--output",
        "--kind",
        "--samples",
        "--mode",
        "--report",
    ]
    assert named["--section.lengths"].path == ("section", "lengths")
    shown = {name: leaf.shown for name, leaf in named.items() if leaf.shown}
    assert shown == {
        "--depths": "0.5", "--section.lengths": "64", "--section.depths": "0 1", "--output": "out", "--samples": "4",
        "--mode": "on", "--report": "on",
    }  # fmt: skip


def test_options_are_built_from_the_values_of_their_leaves():
    options = from_leaves(Outer, {("model",): "m", ("inner", "lengths"): [128], ("section", "chunk"): 8})
    assert options == Outer("m", Inner((128,), (0.5,)), Inner((64,), chunk=8))
    assert json.loads(json.dumps(to_dict(options))) == yaml.safe_load(to_yaml(options))
    assert to_dict(options)["section"] == {"lengths": [64], "depths": [0.0, 1.0], "chunk": 8}


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": 0}, {"samples": 1.5}, {"samples": None}, {"mode": "of"}, {"output": 3}, {"kinds": "one"},
    ],
    ids=str,
)  # fmt: skip
def test_a_value_out_of_its_bounds_is_refused(changes):
    name = next(iter(changes))
    with pytest.raises(ValueError, match=name):
        Outer("m", Inner([64]), **changes)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_has_a_name_of_its_own(name):
    flags = [flag for leaf in leaves(COMMANDS[name]) for flag in (leaf.flag, *leaf.short)]
    assert len(set(flags)) == len(flags)
