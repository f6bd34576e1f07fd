"""The table of tasks and methods: what it says, and that the page shows it."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

import rope_patch

FOLDER = Path(__file__).parents[2] / "benchmarks"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FOLDER.is_dir(), reason="not in the source distribution")]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("task_table")


def test_the_page_holds_what_was_measured(script):
    page = (FOLDER.parent / "docs" / "tasks.md").read_text(encoding="utf-8")
    assert script.page_with_tables(page) == page


def test_a_task_that_one_method_answers_separates_it_from_one_that_does_not(script, monkeypatch, tmp_path):
    output = tmp_path / "table.json"
    words = ["--lengths", "256", "--tasks", "passkey vt json_kv", "--methods", "default nope", "--samples", "8"]
    model = str(rope_patch.data_path("assets") / "llama")
    monkeypatch.setattr(sys, "argv", ["task_table.py", model, *words, "--depths", "0.1 0.9", "-o", str(output)])
    script.main()
    passkey, vt, json_kv = json.loads(output.read_text())["rows"]
    assert passkey["exact_match"] == {"default": 1.0, "nope": 0.0} and passkey["saturated"] is None
    assert passkey["separated"] == {"exact_match": ["default - nope"], "logprob": ["default - nope"]}
    assert vt["saturated"] == "none" and vt["separated"]["exact_match"] == []
    # Two depths, .1 and .9, are read 1.9 times, so a task that asks once has 15 haystacks for the others' 8.
    assert vt["prompts"] == 15 * 2 and passkey["prompts"] == 8 * 2
    assert "needs at least" in json_kv["no_room"]


def test_other_tasks_and_lengths_stay_in_the_file(script, tmp_path):
    def report(task, length, command, model="llama"):
        rows = [{"task": task, "length": length, "no_room": command}]
        same = {"mode": "single", "depths": [0.5], "samples": 1, "model": model}
        return {**same, "commands": [command], "rows": rows}

    path = tmp_path / "table.json"
    first = report("niah", 256, "one")
    assert script.joined(first, path) == first
    path.write_text(json.dumps(first))
    both = script.joined(report("cwe", 256, "two"), path)
    assert [row["task"] for row in both["rows"]] == ["cwe", "niah"] and both["commands"] == ["one", "two"]
    assert script.joined(report("niah", 256, "again"), path)["rows"] == report("niah", 256, "again")["rows"]
    with pytest.raises(SystemExit, match="has another model, llama: give another file"):
        script.joined(report("cwe", 256, "two", model="gemma3"), path)
