"""Commands say first how much they read and how long that takes."""

import pytest
from support.commands import DOMAINS, invoke

import rope_patch

BUNDLED = str(rope_patch.data_path("assets") / "llama")


@pytest.fixture(autouse=True)
def ten_tokens_a_second(monkeypatch):
    monkeypatch.setattr("rope_patch.evaluation.time_budget.tokens_per_second", lambda *_, **__: 10.0)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        # Two methods read 2 windows of 64 tokens and 4 prompts of 64.
        (("compare", "--methods", "default yarn", "--lengths", "64"), "reads 768 tokens, about 77 seconds"),
        # Full precision and a format, and 2 windows three times for KL and the statistics of keys.
        (("kv-check", "--formats", "int8-token", "--lengths", "64"), "reads 896 tokens, about 90 seconds"),
        # A row of each of five texts, twice.
        (("analyze", "--window", "32", "--tokens", "64", "--p", ""), "reads 160 tokens, about 16 seconds"),
    ],
    ids=lambda value: value[0],
)
def test_tokens_and_time_are_said_before_anything_is_read(tmp_path, words, line):
    command, *options = words
    if command != "analyze":
        options += ["--windows", "2", "--depths", "0.5", "--text", DOMAINS]
    result = invoke(command, BUNDLED, *options, "--no-report", "--json", "--dtype", "float32", "-o", tmp_path)
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith(line), result.stderr
