"""Commands are timed, and what they announce is read off."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

import rope_patch
from rope_patch.cli.loading import say_estimate

FOLDER = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="not in the source distribution")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("command_times")


def test_a_command_is_timed_and_resumed(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = rope_patch.data_path("assets") / "llama"
    compare = ("rope-patch", "compare", script.MODEL, "--methods", "default", "--lengths", "64")
    small = (*compare, "--windows", "1", "--samples", "1", "--no-report", "-o", script.OUTPUT)
    monkeypatch.setattr(script, "COMMANDS", {"compare": small})
    measured = script.measure(small, model)
    assert measured["command"].endswith("--no-report -o OUTPUT") and measured["minutes"] >= 0
    assert measured["tokens"] > 64 and measured["estimated"]
    with pytest.raises(RuntimeError, match="inspect --no-such-option failed"):
        script.measure(("rope-patch", "inspect", "--no-such-option"), model)
    report = tmp_path / "times.json"
    report.write_text('{"rows": {"compare": {"minutes": 1.5}}}')
    monkeypatch.setattr(sys, "argv", ["command_times.py", "-o", str(report)])
    script.main()
    assert report.read_text() == '{"rows": {"compare": {"minutes": 1.5}}}', "nothing was left to measure"


def test_what_commands_announce(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    say_estimate(89_000, 420.0)
    found = script.ANNOUNCED.search(capsys.readouterr().err)
    assert found[1] == "89,000" and found[2] == "7 min"
    say_estimate(9_000, 40.0, " (2 processes), and up to 500 more (2 s)")
    found = script.ANNOUNCED.search(capsys.readouterr().err)
    assert found[2] == "40 s (2 processes), and up to 500 more (2 s)"
