"""The shapes that ship as JSON are those of transformers' own models.

``python tests/planning/test_shipped_shapes.py`` writes the file again from ``rope_patch/assets/configs``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rope_patch.packaged import data_path
from rope_patch.planning import Shape, shape_of, shipped
from rope_patch.planning.reading import read_config

CONFIGS = {path.stem: path for path in (data_path("assets") / "configs").glob("*.json")}
FILE = data_path("assets") / "shapes.json"


def repository(path: Path) -> str:
    return json.loads(path.read_text(encoding="utf-8"))["_name_or_path"]


def write() -> None:
    names = sorted(CONFIGS, key=str.lower)
    data = {
        name: {"repository": repository(CONFIGS[name]), "shape": read_config(CONFIGS[name]).to_dict()} for name in names
    }
    text = json.dumps(data, indent=1)
    inner = re.compile(r"\[[^][{}]*\]")  # lists of numbers and words stand on one line
    FILE.write_text(inner.sub(lambda match: re.sub(r"\s+", " ", match[0]), text) + "\n", encoding="utf-8")


def test_every_config_has_a_shape_and_every_shape_a_config():
    assert set(shipped()) == set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_shipped_shape_is_that_of_transformers_own_model(name):
    assert shape_of(name) == read_config(CONFIGS[name])
    assert json.loads(FILE.read_text(encoding="utf-8"))[name]["repository"] == repository(CONFIGS[name])


def test_a_shape_is_the_same_after_json():
    shape = read_config(CONFIGS["gemma-3-1b"])
    assert Shape.from_dict(json.loads(json.dumps(shape.to_dict()))) == shape
    assert len(shape.kinds) == 2


if __name__ == "__main__":
    write()
