"""``rope-patch theory``: numbers for people and machines, a page that loads nothing, errors in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from support.commands import invoke
from support.report_pages import Page, accessible, loads_nothing

import rope_patch
from rope_patch.reports.plots.theory import curves

SMALL = ("--head-dim", "16", "--trained-length", "64", "--length", "256")


def run(*arguments: str | Path) -> str:
    result = invoke("theory", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_tables_for_people(tmp_path):
    printed = run("--method", "pi:factor=4", *SMALL, "--no-report", "-o", tmp_path / "deep" / "out")
    assert "pi:factor=4: head_dim 16, rope_theta 10000, 64 → 256 tokens" in printed
    lines = printed.splitlines()
    # 2 pi * 10000 ** (7/8) = 19869 tokens, and four times that
    assert next(line for line in lines if "Slowest wavelength" in line).split()[-2:] == ["19,869", "79,477"]
    row = next(line for line in lines if "ABF 50: mean sine" in line)
    assert "0.0721" in row and "0.076" in row and "+5.4 %" in row
    assert [path.name for path in (tmp_path / "deep" / "out").iterdir()] == ["theory.json"]


def test_one_column_where_nothing_changed(tmp_path):
    assert "plain RoPE  " in run(*SMALL, "--no-report", "-o", tmp_path)


def test_a_checkpoint_gives_its_table_and_its_trained_length(tmp_path):
    """The bundled Llama: 16 pairs, rope_theta 10000, 256 tokens; only its config is read."""
    (tmp_path / "model").mkdir()
    shutil.copy(rope_patch.data_path("assets") / "llama" / "config.json", tmp_path / "model")
    data = json.loads(run(tmp_path / "model", "--method", "yarn", "--no-report", "--json", "-o", tmp_path))
    assert (data["base"], data["method"]) == ("the table of model", "yarn:factor=4")
    assert (data["head_dim"], data["rope_theta"], data["trained_length"], data["length"]) == (32, 10000, 256, 1024)
    plain = ("--head-dim", "32", "--trained-length", "256", "--length", "1024", "--method", "yarn:factor=4")
    assert json.loads(run(*plain, "--no-report", "--json", "-o", tmp_path))["table"] == data["table"]


def test_json_is_standard_and_the_file_says_the_same(tmp_path):
    given = ("--method", "abf:factor=50+p_rope:p=0.5", "--rope-theta", "5e5", "--trained-length", "1k")
    printed = run(*given, "--head-dim", "32", "--length", "2k", "--no-report", "--json", "-o", tmp_path)

    def refuse(constant):
        raise AssertionError(f"{constant} is no standard JSON")

    data = json.loads(printed, parse_constant=refuse)
    assert json.loads((tmp_path / "theory.json").read_text()) == data
    assert (data["method"], data["trained_length"], data["length"]) == (given[1], 1024, 2048)
    assert len(data["inv_freq"]) == 16 and data["inv_freq"][8:] == [0] * 8
    facts = {fact["name"]: fact for fact in data["table"]}
    assert facts["Unrotated pairs"] == {"name": "Unrotated pairs", "unit": "of 16", "before": 0, "after": 8, "note": ""}
    assert facts["Quarter turn of the slowest pair"]["after"] is None
    printed_and_ours = {e["name"]: (e["ours"], e["printed"], e["difference"]) for e in data["papers"]}
    ours, theirs, difference = printed_and_ours["Phi-1: L·f of pair 10 [rad]"]
    assert (ours, theirs) == (pytest.approx(6.4763, abs=1e-4), 6.38)
    assert difference == pytest.approx(theirs / ours - 1)


@pytest.mark.parametrize(("method", "images"), [("default", 3), ("yarn:factor=4", 4), ("nope", 3)])
def test_the_page_is_whole_and_loads_nothing(tmp_path, method, images):
    run("--method", method, *SMALL, "-o", tmp_path)
    text = (tmp_path / "theory.html").read_text()
    loads_nothing(text)
    accessible(text)
    page = Page(text)
    assert len(page.all("img")) == images  # no wavelengths where nothing changes, no head without rotation
    assert method in "".join(page.text)
    cells = [content for _, content in page.row("ABF 50: mean sine of consecutive images, d → ∞")]
    assert cells[1:5] == ["Xiong et al. theorem 1", "0.0721", "0.076", "+5.4 %"]


def test_curves_have_one_colour_for_a_name():
    x, y = torch.arange(1.0, 4.0), torch.tensor([0.1, 0.9, 0.4])
    figure = curves(
        {"a": {"one": (x, y)}, "b": {"two": (x, y), "one": (x, y)}}, title="t", xlabel="distance", ylabel="y"
    )
    assert figure.get_supxlabel() == "distance [tokens], log scale"
    assert [text.get_text() for text in figure.legends[0].texts] == ["one", "two"]
    first, second = figure.axes
    assert first.lines[0].get_color() == second.lines[1].get_color() != second.lines[0].get_color()
    assert first.lines[0].get_ydata() == pytest.approx(y.tolist())


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
def test_errors_are_one_line_and_write_nothing(tmp_path, arguments, message):
    result = invoke("theory", *arguments, "-o", tmp_path / "out")
    assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "is a file: give a folder to write" in invoke("theory", *SMALL, "-o", tmp_path / "file").stderr
    assert (tmp_path / "file").read_text() == "mine"
