"""``--budget``: what is read fits into the time at the speed that was measured, and what that costs is said."""

from __future__ import annotations

import json

import pytest
from support.commands import DOMAINS, fail, invoke
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.evaluation import time_budget as budget

BUNDLED = str(rope_patch.data_path("assets") / "llama")
FEW = ("--samples", "1", "--depths", "0.5", "--no-report", "--text", DOMAINS, "--haystack", "noise")


def said(*words):
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    return result.stderr


def reads_by_default(monkeypatch, tokens):
    """Let a command read so many tokens with the bundled checkpoint where no time is given."""
    parameters = AutoModelForCausalLM.from_pretrained(BUNDLED).num_parameters()
    monkeypatch.setitem(budget.DEFAULT_WORK, "cpu", tokens * parameters)


@pytest.fixture(autouse=True)
def a_thousand_tokens_a_second(monkeypatch):
    monkeypatch.setattr("rope_patch.evaluation.time_budget.tokens_per_second", lambda *_, **__: 1000.0)


def test_compare_leaves_out_lengths_but_keeps_its_methods(tmp_path):
    words = ("compare", BUNDLED, "--methods", "default yarn", "--lengths", "128 512", "-o", tmp_path, *FEW)
    lines = said(*words, "--budget", "3s")  # 1275 tokens for each method; both lengths need 4 * 512 + 640 at least
    assert "nothing is measured at 512 tokens" in lines and "reads 2,304 tokens" in lines
    first = json.loads((tmp_path / "comparison.json").read_text())
    assert first["lengths"] == [128] and first["spec"]["windows"] == 8  # (1275 - 128) / 128
    assert [row["method"] for row in first["rows"]] == ["default", "yarn:factor=2"], "the factor for 512 tokens"


def test_compare_says_what_would_fit_where_not_even_the_shortest_length_does(tmp_path, monkeypatch):
    monkeypatch.setattr("rope_patch.evaluation.time_budget.tokens_per_second", lambda *_, **__: 500.0)
    words = ("compare", BUNDLED, "--methods", "default", "--lengths", "128 512", "-o", tmp_path / "out", *FEW)
    line = fail(*words, "--budget", "1s")
    assert "at least 640 tokens" in line and "1.5 times what fits into the time" in line


@pytest.mark.parametrize(
    ("speed", "larger"), [(1000.0, "--budget 1m"), (100.0, "--budget 2m"), (0.5, "a larger budget")]
)
def test_extend_says_which_budget_would_do_and_leaves_nothing_behind(tmp_path, monkeypatch, speed, larger):
    monkeypatch.setattr("rope_patch.evaluation.time_budget.tokens_per_second", lambda *_, **__: speed)
    line = fail("extend", BUNDLED, "--length", "1k", "--budget", "1s", "-o", tmp_path / "out")
    assert line.endswith(f"name fewer methods, or give {larger}\n") and "ZeroDivision" not in line
    assert list(tmp_path.iterdir()) == []


def test_what_is_chosen_stays_where_the_size_of_the_model_decides(tmp_path, monkeypatch):
    reads_by_default(monkeypatch, 1000)
    words = ("kv-check", BUNDLED, "--formats", "int8-token", "--lengths", "64", "--text", DOMAINS, "--depths", "0.5")
    words += ("--no-report", "-o", tmp_path)
    lines = said(*words, "--windows", "6")
    assert "for a model of this size: 1 instead of 4 samples" in lines and "windows" not in lines.split(":")[1]
    spec = json.loads((tmp_path / "kv-check.json").read_text())["spec"]
    assert (spec["windows"], spec["samples"]) == (6, 1)
    said(*words, "--samples", "2")
    spec = json.loads((tmp_path / "kv-check.json").read_text())["spec"]
    assert (spec["windows"], spec["samples"]) == (5, 2), "500 tokens for each of two: 5 windows and 2 prompts"


def test_a_budget_that_is_long_enough_changes_nothing(tmp_path):
    words = ("compare", BUNDLED, "--methods", "default", "--lengths", "64", "--windows", "2", "-o", tmp_path, *FEW)
    assert "--budget:" not in said(*words, "--budget", "1m")
    assert json.loads((tmp_path / "comparison.json").read_text())["spec"]["windows"] == 2


def test_compare_reads_less_of_a_large_model_also_with_json_and_all_of_what_was_chosen(tmp_path, monkeypatch):
    reads_by_default(monkeypatch, 2000)
    words = ("compare", BUNDLED, "--methods", "default yarn:factor=2", "--lengths", "64", "--text", DOMAINS)
    words += ("--depths", "0.5", "--no-report")

    def spec(name, *options):
        lines = said(*words, "-o", tmp_path / name, *options)
        read = json.loads((tmp_path / name / "comparison.json").read_text())["spec"]
        return read["windows"], read["samples"], "for a model of this size" in lines

    assert spec("default") == (12, 3, True), "1000 tokens for each method: 12 windows and 3 prompts, 960 tokens"
    assert spec("json", "--json") == (12, 3, True)
    assert spec("chosen", "--windows", "16", "--samples", "4") == (16, 4, False)
    assert spec("budget", "--budget", "60s") == (None, 4, False)
