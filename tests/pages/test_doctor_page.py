"""docs/doctor.md shows what ``rope-patch doctor`` really prints of its broken example."""

import json
import re
import shutil
from pathlib import Path

import pytest
from support.broken import CASES
from support.commands import invoke
from support.patches import edit_json
from support.tiny import LLAMA

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="not in the source distribution")


def test_the_broken_example_prints_what_the_page_shows(tmp_path, monkeypatch):
    blocks = dict(re.findall(r"```(json|console)\n(.*?)```", PAGE.read_text(), re.S))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(LLAMA, "llama")
    edit_json(Path("llama/config.json"), lambda config: config.update(json.loads(blocks["json"])))
    command, *shown = blocks["console"].splitlines()
    result = invoke(*command.split()[2:])
    assert result.exit_code == 1
    printed = iter(result.stdout.splitlines())
    assert [line for line in shown if line != "…" and line not in printed] == []


def test_threads_are_those_of_the_rebuilt_cases():
    rebuilt = {thread for case in CASES.values() for thread in case.threads}
    cited = set(re.findall(r"[\w.-]+/[\w.-]+#\d+", PAGE.read_text()))
    assert len(cited) > 10 and cited <= rebuilt
