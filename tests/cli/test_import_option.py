"""``--import`` makes methods of a user's own module known to commands."""

from __future__ import annotations

import json
import sys

import pytest
from support.fresh import run_module
from support.tiny import tiny_model

import rope_patch
from rope_patch.options import COMMANDS
from rope_patch.options.fields import leaves

MODULE = '''
from dataclasses import dataclass
import rope_patch

@dataclass(frozen=True)
class Slower(rope_patch.Method, name="slower"):
    """Divides every frequency."""
    divisor: float = 2.0

    def inv_freq(self, table):
        return table.inv_freq / self.divisor
'''


def child(folder, *words):
    return run_module("rope_patch.cli.app", *words, cwd=folder)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_methods.py").write_text(MODULE)
    tiny_model().save_pretrained(tmp_path / "base")
    return tmp_path


def test_a_method_of_a_users_module_is_applied(folder):
    done = child(folder, "apply", "base", "slower:divisor=4", "-o", "out", "--import", "my_methods", "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)["record"]
    (before,) = record["base_tables"].values()
    (after,) = record["tables"].values()
    assert after["inv_freq"] == pytest.approx([value / 4 for value in before["inv_freq"]])


def test_a_method_that_returns_nothing_is_named(folder):
    (folder / "my_methods.py").write_text(MODULE.replace("return table.inv_freq / self.divisor", "return None"))
    done = child(folder, "apply", "base", "slower", "-o", "out", "--import", "my_methods")
    said = "the method 'slower' must return its frequencies as a tensor, got None"
    assert done.returncode == 2 and said in done.stderr and not (folder / "out").exists()


def test_every_command_that_names_methods_or_reads_a_patch_has_the_option():
    having = {name for name, options in COMMANDS.items() if any(leaf.flag == "--import" for leaf in leaves(options))}
    assert having == set(COMMANDS) - {"plan", "demo", "tasks", "recipes"}


def test_the_command_of_lm_eval_takes_the_option_too(folder, monkeypatch):
    pytest.importorskip("lm_eval")
    from rope_patch.harness.command import without_imports

    words = ["run", "--tasks", "rope_passkey", "--model_args", "pretrained=x"]
    assert without_imports(words) == words
    monkeypatch.chdir(folder)
    try:
        assert without_imports([*words[:1], "--import", "my_methods", *words[1:]]) == words
        assert "slower" in rope_patch.METHODS
    finally:
        rope_patch.METHODS.pop("slower", None)
        sys.modules.pop("my_methods", None)
