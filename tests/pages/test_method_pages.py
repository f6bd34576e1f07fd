"""The pages of docs/methods: the formulas give the tables of the classes, and the commands run."""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
from support.commands import run
from support.tiny import tiny_model

import rope_patch
from rope_patch.methods import METHODS

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("not in the source distribution", allow_module_level=True)

PAGES = sorted((ROOT / "docs" / "methods").glob("*.md"))
SMOLLM2 = {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}, "max_position_embeddings": 8192}


def blocks(page, kind):
    return re.findall(rf"```{kind}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def formula(page):
    """What the formula of a page defines."""
    (code,) = blocks(page, "python")
    space: dict[str, object] = {}
    exec(compile(code, str(page), "exec"), space)
    return space


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_formula_of_a_page_gives_the_table_of_its_class(page):
    space = formula(page)
    names = [name for name in METHODS if callable(space.get(name))]
    assert names
    for name in names:
        named = {f.name for f in fields(METHODS[name])} & set(space)
        method = METHODS[name](**{parameter: space[parameter] for parameter in named})
        if name == "nope":
            method = METHODS[name]()
        patch = rope_patch.apply(tiny_model(head_dim=64, **SMOLLM2), method)
        before = patch.before[None]
        after = patch.after[None]
        expected = [space[name](i, f) for i, f in enumerate(before.inv_freq.tolist())]
        assert after.inv_freq.tolist() == pytest.approx(expected, rel=2e-6)
        assert after.attention_scaling == pytest.approx(space.get("scaling", 1.0))


def test_every_method_has_a_formula_on_one_page():
    found = [re.findall(r"^def (\w+)\(i, f\)", code, re.MULTILINE) for page in PAGES for code in blocks(page, "python")]
    assert sorted(name for names in found for name in names) == sorted(METHODS)


def test_the_commands_of_the_pages_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "rope_patch/assets/llama", "llama")
    commands = [line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines()]
    assert len(commands) >= len(PAGES)
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "rope-patch"
        least = ["--depths", "0.5", "--no-report"] if arguments[0] == "compare" else []
        run(*arguments, *least)
