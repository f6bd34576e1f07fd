"""``rope-patch theory``: numbers for people and machines, a page that loads nothing, errors in one line."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import pytest
import torch
from report_pages import Page
from typer.testing import CliRunner

from rope_patch.cli import app as cli
from rope_patch.plots import base as plots
from rope_patch.plots import theory as plots_theory
from rope_patch.reports import theory as theory_report
from rope_patch.theory.tables import study

SMALL = ("--head-dim", "16", "--trained-length", "64", "--length", "256")


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(cli.app, ["theory", *map(str, arguments)], catch_exceptions=False)
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
    result = study(head_dim=16, trained_length=64, length=256)
    assert not result.changed
    assert "Plain RoPE</th><th" in theory_report.page(result)


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


@pytest.mark.parametrize("method", ["default", "yarn:factor=4", "nope"])
def test_the_page_is_whole_and_loads_nothing(tmp_path, method):
    run("--method", method, *SMALL, "-o", tmp_path)
    text = (tmp_path / "theory.html").read_text()
    page = Page(text)
    images = page.all("img")
    assert len(images) == (6 if method == "nope" else 7)  # no head without rotation
    for image in images:
        kind, _, data = image["src"].partition(",")
        assert kind == "data:image/svg+xml;base64"
        assert b"</svg>" in base64.b64decode(data)
        assert len(image["alt"]) > 40
    for _, attributes in page.tags:
        for name in ("src", "href", "srcset", "action", "data", "background"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))
    assert not page.all("script") and not page.all("link")
    assert "default-src 'none'" in text
    words = "".join(page.text)
    assert method in words
    cells = [content.strip() for _, content in page.row("ABF 50: mean sine of consecutive images, d → ∞")]
    assert cells[1:5] == ["Xiong et al. thm 1", "0.0721", "0.076", "+5.4 %"]


def test_the_page_is_the_same_for_the_same_study_and_escapes():
    result = study("p_rope:p=0.5", head_dim=16, trained_length=64, length=128)
    first = theory_report.page(result, command="rope-patch <b>")
    assert first == theory_report.page(result, command="rope-patch <b>")
    assert "rope-patch &lt;b&gt;" in first


def test_figures_show_their_arrays():
    x, y = torch.arange(1.0, 4.0), torch.tensor([0.1, 0.9, 0.4])
    figure = plots_theory.nearest_images({"one": (x, y), "two": (x, y / 2)}, trained_length=2, title="t")
    axes = figure.axes[0]
    assert axes.get_xlabel() == "position [tokens]"
    assert axes.lines[1].get_ydata() == pytest.approx((y / 2).tolist())
    assert axes.get_legend().texts[0].get_text() == "one  (0.900)"
    masses = plots_theory.head_masses({"1": (x, y), "2": (x, y), "none": (x, y)}, title="t", ylabel="y", legend="l")
    assert masses.axes[0].lines[-1].get_linestyle() == "--"
    decay = plots_theory.decay({"a": {"one": (x, y)}, "b": {"one": (x, y), "two": (x, y)}}, title="t", ylabel="y")
    assert [text.get_text() for text in decay.legends[0].texts] == ["one", "two"]
    assert decay.axes[0].lines[0].get_color() == decay.axes[1].lines[0].get_color()
    points = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.5]])
    helices = plots_theory.helices({"a": points, "b": points}, trained=points, title="t")
    assert [axes.get_title() for axes in helices.axes] == ["a", "b"]
    assert "</svg>" in plots.svg(helices)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "yarm"), "unknown method 'yarm'. Did you mean 'yarn'?"),
        (("--method", "p_rope:p=2"), "p must be in [0, 1], got 2.0"),
        (("--head-dim", "7"), "rotary_dim must be even and positive (features rotate in pairs), got 7"),
        (("--rope-theta", "1"), "rope_theta must be a finite number > 1, got 1.0"),
        (("--rope-theta", "nan"), "rope_theta must be a finite number > 1, got nan"),
        (("--length", "long"), "a length is a number of tokens such as 4096 or 4k, got 'long'"),
        (("--length", "1"), "length must be at least 2 tokens, got 1"),
        (("--trained-length", "0"), "trained_length must be at least 2 tokens, got 0"),
    ],
)
def test_errors_are_one_line_and_write_nothing(tmp_path, monkeypatch, capsys, arguments, message):
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["rope-patch", "theory", *arguments, "-o", str(out)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    stderr = capsys.readouterr().err
    assert message in stderr and "Traceback" not in stderr and stderr.count("\n") == 1
    assert not out.exists()


def test_a_file_is_no_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["rope-patch", "theory", *SMALL, "-o", str(tmp_path / "file")])
    with pytest.raises(SystemExit):
        cli.main()
    assert "is a file: give a folder to write" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"
