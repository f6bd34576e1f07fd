"""``rope-patch theory``: numbers for people and machines, errors in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.commands import invoke

import rope_patch

SMALL = ("--head-dim", "16", "--trained-length", "64", "--length", "256")


def run(*arguments: str | Path) -> str:
    result = invoke("theory", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_tables_for_people():
    printed = run("--method", "pi:factor=4", *SMALL)
    assert "pi:factor=4: head_dim 16, rope_theta 10000, 64 → 256 tokens" in printed
    lines = printed.splitlines()
    # 2 pi * 10000 ** (7/8) = 19869 tokens, and four times that
    assert next(line for line in lines if "Slowest wavelength" in line).split()[-2:] == ["19,869", "79,477"]


def test_one_column_where_nothing_changed():
    assert "plain RoPE  " in run(*SMALL)


def test_a_checkpoint_gives_its_table_and_its_trained_length(tmp_path):
    """The bundled Llama: 16 pairs, rope_theta 10000, 256 tokens; only its config is read."""
    (tmp_path / "model").mkdir()
    shutil.copy(rope_patch.data_path("assets") / "llama" / "config.json", tmp_path / "model")
    data = json.loads(run(tmp_path / "model", "--method", "yarn", "--json"))
    assert (data["base"], data["method"]) == ("the table of model", "yarn:factor=4")
    assert (data["head_dim"], data["rope_theta"], data["trained_length"], data["length"]) == (32, 10000, 256, 1024)
    plain = ("--head-dim", "32", "--trained-length", "256", "--length", "1024", "--method", "yarn:factor=4")
    assert json.loads(run(*plain, "--json"))["table"] == data["table"]


def test_json_is_standard():
    given = ("--method", "abf:factor=50+p_rope:p=0.5", "--rope-theta", "5e5", "--trained-length", "1k")
    printed = run(*given, "--head-dim", "32", "--length", "2k", "--json")

    data = json.loads(printed, parse_constant=pytest.fail)
    assert (data["method"], data["trained_length"], data["length"]) == (given[1], 1024, 2048)
    assert len(data["inv_freq"]) == 16 and data["inv_freq"][8:] == [0] * 8
    facts = {fact["name"]: fact for fact in data["table"]}
    assert facts["Unrotated pairs"] == {"name": "Unrotated pairs", "unit": "of 16", "before": 0, "after": 8, "note": ""}
    assert facts["Quarter turn of the slowest pair"]["after"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "yarm"), "'yarn'"),
        (("--method", "p_rope:p=2"), "p must"),
        (("--head-dim", "7"), "even"),
        (("--rope-theta", "1"), "rope_theta must be > 1"),
        (("--rope-theta", "nan"), "rope_theta must be a number"),
        (("--length", "long"), "--length"),
        (("model", "--head-dim", "16"), "leave them out"),
        (("--length", "1"), "length must be >= 2"),
        (("--trained-length", "0"), "trained_length must be >= 2"),
    ],
)
def test_errors_are_one_line(arguments, message):
    result = invoke("theory", *arguments)
    assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1
