"""``--import`` makes methods of a user's own module known to commands."""

import sys

import pytest
from support.fresh import run_code
from support.tiny import tiny_model

import rope_patch
from rope_patch.options import COMMANDS
from rope_patch.options.fields import leaves

MODULE = '''
from dataclasses import dataclass
import rope_patch

@dataclass(frozen=True)
class Slower(rope_patch.Method, name="slower"):
    """Forgets to return its frequencies."""

    def inv_freq(self, table):
        table.inv_freq / 2
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_methods.py").write_text(MODULE)
    tiny_model().save_pretrained(tmp_path / "base")
    return tmp_path


def test_a_method_that_returns_nothing_is_named(folder):
    words = ("apply", "base", "slower", "-o", "out", "--import", "my_methods")
    done = run_code("from rope_patch.cli.app import main; main()", *words, cwd=folder)
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
