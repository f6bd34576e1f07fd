"""Defects that are planted in a toy project: one is caught, one survives, and what is finished is not run again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mutations as script
import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

CODE = "def double(x):\n    return x + x\n\n\ndef is_positive(x):\n    return x > 0\n"
TESTS = """
import pytest
from toy.sums.adding import double, is_positive

def test_double():
    assert double(3) == 6

def test_is_positive():
    assert is_positive(1) and not is_positive(-1)

@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_zero_is_not_positive():
    assert not is_positive(0)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one module, whose `make test` leaves a test out."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # pytest starts in a third of the time
    root = tmp_path / "project"
    files = {
        "Makefile": 'test: ## the tests\n\t$(BIN)/python -m pytest -n 2 -m "not full" --durations=20\n',
        "pytest.ini": "[pytest]\nmarkers = full\n",
        "toy/sums/adding.py": CODE,
        "tests/sums/test_adding.py": TESTS,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def run(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plants mutations, each a name with old and new text; returns the report."""
    report = tmp_path / "report.json"

    def run(changes: dict[str, tuple[str, str]], *words: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["mutations.py", "-o", str(report), *words])
        planted = [script.Mutation(name, "toy/sums/adding.py", *change) for name, change in changes.items()]
        script.main(planted, project)
        result: dict[str, Any] = json.loads(report.read_text())
        return result

    return run


TWO = {"product": ("x + x", "x * x"), "zero_is_positive": ("x > 0", "x >= 0")}


def test_a_defect_is_caught_by_a_test_or_survives(run: Any, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(TWO)
    product, zero = report["mutations"].values()
    assert (product["outcome"], product["by"]) == ("caught", "tests/sums/test_adding.py::test_double")
    assert (zero["outcome"], zero["by"]) == ("survived", None)  # the test that would is not one of `make test`
    assert (product["commit"], zero["commit"]) == (None, None)  # no repository
    assert report["selection"] == "not full"
    assert "sums           1 of   2 caught\nsurvived: zero_is_positive" in capsys.readouterr().out
    assert (project / "toy/sums/adding.py").read_text() == CODE

    (project / "tests/sums/test_adding.py").write_text(TESTS.replace("@pytest.mark.full\n", ""))
    assert run(TWO) == report  # finished
    again = run(TWO, "--again")["mutations"]
    assert again["product"] == product
    assert again["zero_is_positive"]["by"] == "tests/sums/test_adding.py::test_zero_is_not_positive"


@pytest.mark.parametrize(
    ("old", "message"),
    [("x", "occurs 5 times in toy/sums/adding.py, it must occur once: 'x'"), ("y", "occurs 0 times")],
)
def test_a_text_that_does_not_occur_once_is_an_error(run: Any, old: str, message: str) -> None:
    with pytest.raises(SystemExit, match=f"error: wrong: the text to be changed {message}"):
        run({**TWO, "wrong": (old, "z")})


def test_tests_that_fail_without_a_defect_are_an_error(run: Any, project: Path) -> None:
    (project / "tests/sums/test_adding.py").write_text(TESTS.replace("== 6", "== 7"))
    with pytest.raises(SystemExit, match="test_double fails without any defect"):
        run(TWO)
    with pytest.raises(SystemExit, match="test_double fails without any defect"):
        run(TWO)  # nothing counts as finished


def test_tests_that_do_not_end_have_caught_it(project: Path) -> None:
    (project / "tests/sums/test_adding.py").write_text("def test_waits():\n    __import__('time').sleep(60)\n")
    result = script.run_tests(project, ["tests/sums/test_adding.py"], "not full", 1)
    assert (result["outcome"], result["by"]) == ("caught", "no end within 1 s")


def test_the_mutations_of_the_package_all_apply() -> None:
    names = [mutation.name for mutation in script.MUTATIONS]
    assert len(set(names)) == len(names)
    for mutation in script.MUTATIONS:
        assert script.planted(mutation, ROOT) != (ROOT / mutation.file).read_text("utf-8")
