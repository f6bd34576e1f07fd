"""What the page about two tables shows of what was measured."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FOLDER.is_dir(), reason="not in the source distribution")]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("two_tables")


def test_the_page_holds_what_was_measured(script: Any) -> None:
    page = (FOLDER.parent / "docs" / "two-tables.md").read_text(encoding="utf-8")
    assert script.page_with_tables(page) == page
    report = script.results("two_tables_llama")
    for command in (report["compare"]["command"], report["lm_eval"]["command"]):
        assert " ".join(command.split()) in " ".join(page.replace("`", "").split())


@pytest.mark.full
def test_both_commands_are_read(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Below the switch both say of two tables what they say of the unpatched model."""
    monkeypatch.setattr(script, "COMPARE", script.COMPARE.replace('"128 256 512 1024"', "256").replace("s 3", "s 1"))
    monkeypatch.setattr(sys, "argv", ["two_tables.py"])
    report = script.measure(tmp_path)
    compared, harness = report["compare"], report["lm_eval"]["methods"]
    assert compared["methods"] == ["default", "yarn:factor=4", "yarn:factor=4@256", "mrrope:factor=4@256"]
    perplexity = next(iter(compared["columns"].values()))
    assert perplexity[0] == perplexity[2] < perplexity[1]
    assert harness["default"]["rope_ppl_256"] == pytest.approx(harness["yarn:factor=4@256"]["rope_ppl_256"])
    assert harness["yarn:factor=4"]["rope_ppl_1k"] == pytest.approx(harness["yarn:factor=4@256"]["rope_ppl_1k"])
