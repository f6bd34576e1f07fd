"""``rope-patch kv-check``: its figures, its page, its tables, its errors."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from evaluated import check_cache
from kv_rows import BASE, by_hand, error, off
from report_pages import Page, accessible
from tiny import small
from transformers import AutoTokenizer
from typer.testing import CliRunner

import rope_patch
from rope_patch.cli import app as cli
from rope_patch.evaluation.answers import shortest_of_each
from rope_patch.files import folder_to_write
from rope_patch.frequencies import geometric, wavelength
from rope_patch.kv_cache.schemes import PRESETS
from rope_patch.kv_evaluation.verdicts import Limits
from rope_patch.plots import base as plots
from rope_patch.plots import kv as plots_kv
from rope_patch.plots.kv import Spot, Waves, errors_by_layer, errors_by_wavelength, front, outlier_shares, tradeoff
from rope_patch.reports import kv as kv_report
from rope_patch.reports import kv_pictures

SCHEMES = ["int4-token", "k=int2.token8;v=int8.token", "kivi-2"]
TEXT = (rope_patch.data_path("assets") / "domains" / "english.txt").read_text(encoding="utf-8")
ASKED = {"windows": 3, "samples": 1, "text": TEXT, "haystack": "noise", "depths": (0.0, 1.0)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("kv") / "tiny<b>"
    small().save_pretrained(path)
    AutoTokenizer.from_pretrained(Path(rope_patch.data_path("assets")) / "llama").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def checked(folder):
    model, tokenizer = rope_patch.load(folder), AutoTokenizer.from_pretrained(folder)
    return check_cache(model, tokenizer, SCHEMES, methods=["default", "p_rope:p=0.5"], lengths=[40, 56], **ASKED)


@pytest.fixture
def undrawn(monkeypatch):
    monkeypatch.setattr(plots, "svg", lambda figure: "<svg></svg>")


def errors(size=1.0):
    """Errors of the two layers of the tiny model: pair 3 carries them."""
    pair = [[0.1, 0.1, 0.1, size, 0.1, 0.1, 0.1, 0.1]] * 2
    return [error(i, 0.4 * size, pair=pair, direct=0.2, induced=0.3) for i in range(2)]


def unsafe(checked, scheme="a", **changes):
    """A check with schemes that are unsafe, safe and undecided."""
    broken = off(0.5, 0.51, 0.49, 0.5)
    rows = [by_hand("none", BASE), by_hand(scheme, broken, errors=errors())]
    rows += [by_hand(f"{scheme}+ok", BASE, errors=errors(0.1), bits=5.0)]
    rows += [by_hand(f"{scheme}+bad", broken, errors=errors(), bits=6.0)]
    rows += [by_hand("b", off(0.1, -0.1, 0.1, -0.1), errors=errors(0.5), bits=8.0)]
    given = {"rows": tuple(rows), "spec": rows[0].scores.spec, "captures": {"m": checked.captures["default"]}}
    return replace(checked, **given | changes)


# --- figures


def spots():
    return [
        Spot("", 16.0, 0.0, 0.0, 0.0, "", ""),
        Spot("one", 4.0, 5.0, 4.0, 6.0, "unsafe", "one"),
        Spot("+fix", 4.5, 0.5, 0.1, 0.9, "safe", "one", True),
        Spot("two", 8.0, 0.7, -math.inf, math.inf, "undecided", "two"),
        Spot("three", 8.0, 0.7, 0.6, 0.8, "safe", "three"),
        Spot("lost", 3.0, math.nan, math.nan, math.nan, "unsafe", "lost"),
    ]


def test_the_front_is_what_nothing_beats():
    assert front([]) == []
    assert front([(4, 5.0), (4.5, 0.5), (8, 0.7), (8, 0.7), (16, 0.0)]) == [0, 1, 4]
    assert front([(8, 1.0), (8, 1.0)]) == [0]


def test_tradeoff_by_hand():
    names = ["one", "two", "three", "lost"]
    figure = tradeoff({"m": spots(), "n": spots()[:2]}, names, title="t", ylabel="y [%]", lower=True, limit=2.0)
    assert figure.get_supxlabel() == "bits per element of the cache, log scale" and figure.get_supylabel() == "y [%]"
    first, second = figure.axes
    assert first.get_title(loc="left") == "m" and first.get_yscale() == "symlog" and first.get_xscale() == "log"
    steps, *rest = first.lines
    assert steps.get_drawstyle() == "steps-post" and steps.get_xydata().tolist() == [[4, 5], [4.5, 0.5], [16, 0]]
    points = {tuple(line.get_xydata()[0]): line for line in rest if line.get_marker() not in ("None", "")}
    assert points[4.0, 5.0].get_marker() == "X" and points[4.5, 0.5].get_markerfacecolor() == "white"
    assert points[4.0, 5.0].get_color() == points[4.5, 0.5].get_color() != points[8.0, 0.7].get_color()
    bars = [
        line.get_ydata().tolist() for line in rest if line.get_marker() == "None" and len(set(line.get_xdata())) == 1
    ]
    assert [4.0, 6.0] in bars and [0.6, 0.8] in bars and [0.1, 0.9] not in bars
    assert [2.0, 2.0] in [list(line.get_ydata()) for line in rest]
    renderer = figure._get_renderer()
    texts = [text for text in first.texts if text.get_text() in ("one", "+fix", "two", "three")]
    assert len(texts) == 4 and "lost" not in [text.get_text() for text in first.texts]
    boxes = [text.get_window_extent(renderer) for text in texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])  # two points are one
    assert len(second.lines) == 1 + 2 + 2 + 1  # steps, two lines across, two points, one bar
    legend = [text.get_text() for text in figure.legends[0].texts]
    assert legend == [*names, "safe", "undecided", "unsafe", "full precision", "hollow: a mitigation"]
    up = tradeoff({"m": spots()[:2]}, ["one"], title="t", ylabel="y", lower=False)
    assert up.axes[0].get_yscale() == "linear" and up.axes[0].lines[0].get_xydata().tolist() == [[4, 5]]
    assert plots.svg(figure) == plots.svg(
        tradeoff({"m": spots(), "n": spots()[:2]}, names, title="t", ylabel="y [%]", lower=True, limit=2.0)
    )


def test_errors_by_wavelength_by_hand():
    table = geometric(1e4, 16).double()
    rests = table.clone()
    rests[6:] = 0
    values = torch.tensor([1.0, 2.0, 0.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    panels = {
        "m": Waves(wavelength(table), {"a": values}, 256),
        "n": Waves(wavelength(rests), {"a": values, "b": values}, 64),
    }
    figure = errors_by_wavelength(panels, ["a", "b"], title="t")
    assert figure.get_supxlabel() == "wavelength of the pair [tokens], log scale"
    assert figure.get_supylabel() == "rms error of the logit"
    for axes, context in zip(figure.axes, (256, 64), strict=True):
        # A wavelength of L is a frequency of 2 pi / L.
        assert next(line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "--") == context
        assert axes.get_xscale() == axes.get_yscale() == "log"
    turning, resting = figure.axes[1].lines[:2]
    assert turning.get_xdata().tolist() == pytest.approx(wavelength(table)[:6].tolist())
    assert math.isnan(turning.get_ydata()[2]) and resting.get_ydata().tolist() == [7.0, 8.0]
    assert min(resting.get_xdata()) > float(wavelength(table).max())
    assert figure.axes[1].get_xticklabels()[-1].get_text() == "unrotated"
    alone = errors_by_wavelength({"m": Waves(wavelength(torch.zeros(8)), {"a": values}, 64)}, ["a"], title="t")
    assert alone.axes[0].lines[1].get_ydata().tolist()[3:] == [4, 5, 6, 7, 8]


def test_errors_by_layer_and_shares_by_hand():
    figure = errors_by_layer({"m": {"a": ([0, 2, 5], [10.0, 0.0, 30.0]), "b": ([0], [1.0])}}, ["a", "b"], title="t")
    assert figure.axes[0].lines[0].get_xydata().tolist() == [[0, 10], [5, 30]]
    assert (figure.get_supxlabel(), figure.get_supylabel()) == ("layer", "error of the output [%], log scale")
    shares = {"s": {"m": (torch.tensor([0.1, 0.5]), torch.tensor([0.9, 0.5]))}}
    figure = outlier_shares(shares, title="t")
    diagonal, points = figure.axes[0].lines
    assert diagonal.get_xydata().tolist() == [[0, 0], [1, 1]]
    assert points.get_xydata().ravel().tolist() == pytest.approx([0.1, 0.9, 0.5, 0.5])
    assert "[%]" in figure.get_supxlabel() and "[%]" in figure.get_supylabel()


def test_pictures_show_the_check(checked, monkeypatch):
    drawn = {}
    for name in ("tradeoff", "errors_by_wavelength", "errors_by_layer", "outlier_shares"):
        original = getattr(plots_kv, name)
        monkeypatch.setattr(plots_kv, name, lambda *a, f=original, n=name, **k: drawn.setdefault(n, a) and f(*a, **k))
    pictures = [*kv_pictures.tradeoffs(checked, 56), kv_pictures.by_wavelength(checked), kv_pictures.by_layer(checked)]
    pictures += [kv_pictures.radii(checked)]
    assert all(len(picture.alt) > 40 and len(picture.caption) > 40 for picture in pictures)
    (panels, names) = drawn["tradeoff"]
    assert list(panels) == ["default", "p_rope:p=0.5"] and names == SCHEMES
    row = checked.of("p_rope:p=0.5")[1]
    spot = panels["p_rope:p=0.5"][1]
    assert (spot.label, spot.bits) == ("int4-token", 6)
    assert panels["default"][3].label == "kivi-2" and panels["default"][3].bits == 16  # all of it is residual window
    assert spot.value == pytest.approx(100 * math.expm1(checked.change(row, 56)[0]))
    waves = drawn["errors_by_wavelength"][0]["p_rope:p=0.5"]
    assert waves.context == 64 and waves.wavelength.isinf().sum() == 4
    pairs = torch.cat([item.pair for item in row.errors])
    assert torch.equal(waves.errors["int4-token"], pairs.square().mean(0).sqrt())
    layers, values = drawn["errors_by_layer"][0]["default"]["int4-token"]
    assert layers == [0, 1]
    assert values == [100 * float(item.output.mean()) for item in checked.of("default")[1].errors]
    assert kv_pictures.radii(replace(checked, limits=Limits(context=16))).caption == pictures[-1].caption


@pytest.mark.parametrize(
    ("low", "high"), [(0.0112, 0.0119), (0.012, 0.07), (0.12, 4.0), (1e-6, 3e-6), (1e-4, 3.0), (0.5, 0.5), (9.0, 11.0)]
)
def test_the_axis_of_pairs_has_two_numbers(low, high):
    values = torch.linspace(low, high, 8).double()
    wave = Waves(wavelength(geometric(1e4, 16).double()), {"a": values}, 64)
    figure = errors_by_wavelength({"m": wave, "n": wave}, ["a"], title="t")
    figure.draw_without_rendering()
    axes = figure.axes[0]
    bottom, top = axes.get_ylim()
    labels = [tick.label1.get_text() for tick in axes.yaxis.get_major_ticks() if bottom <= tick.get_loc() <= top]
    assert bottom < low and top > high and len({label for label in labels if label}) >= 2


# --- the page


def test_the_page_is_whole_and_loads_nothing(checked):
    text = kv_report.page(checked, command="rope-patch kv-check <x>")
    page = Page(text)
    accessible(text)
    page_text = "".join(page.text)
    images = page.all("img")
    assert len(images) == 5 + (kv_pictures.shares(checked) is not None)
    for image in images:
        kind, _, data = image["src"].partition(",")
        assert kind == "data:image/svg+xml;base64" and b"</svg>" in base64.b64decode(data)
    assert not page.all("script") and not re.search(r"url\(|@import|<b>", text)
    assert "rope-patch kv-check <x>" in page_text and "Quantized caches: tiny<b>" in page_text
    for sentence in checked.summary():
        assert sentence in page_text
    for fact in ("3 windows of 56 tokens, which do not overlap (no stride)", "task passkey", "seed 0", "not packed"):
        assert fact in page_text
    assert not re.search(r"\b(nan|inf|None)\b", page_text)
    assert text == kv_report.page(checked, command="rope-patch kv-check <x>")


def test_the_tables_have_the_numbers(checked, undrawn):
    page = Page(kv_report.page(checked))
    firsts = [[cell for _, cell in cells] for cells in page.rows if cells[0][1].strip() == "int4-token"]
    row = checked.of("default")[1]
    change, low, high = (100 * math.expm1(nats) for nats in checked.change(row, 40))

    def shown(value):
        return f"{value:+.{2 if abs(value) < 10 else 1}f}".replace("-", "−")

    assert firsts[0][1] == "6.00" and firsts[0][2] == f"{row.scores.perplexity.between(0, 40):.0f}"
    assert firsts[0][3] == f"{shown(change)} %{shown(low)} % to {shown(high)} %"
    assert firsts[0][-1] == checked.verdict(row, 40).kind
    assert firsts[0][6] == f"±{100 * math.expm1(row.noise[40]):.2f} %"
    assert firsts[0][7] == f"{row.divergence.kl:.4f}"
    kivi = next(cells for cells in page.rows if cells[0][1].strip() == "kivi-2")
    assert kivi[1][1] == "16.003.50"  # the cache, and what would be quantized of a longer one
    assert page.rows[1][0][1].strip() == "default: full precision"
    text = "".join(page.text)
    assert PRESETS["kivi-2"].source in text and "given as a text" in text
    correlations = [cells for cells in page.rows if cells[0][1].strip() == "int4-token"][-2]
    assert correlations[2][1] == f"{row.prediction[0]:.2f}".replace("-", "−")


def test_first_choice_stands_below_exact_match_and_answers_with_their_verdict(checked, undrawn):
    """Of the scheme's two answers at 40 tokens one is right here, and another one is first choice."""
    row = checked.of("default")[1]
    result = row.scores.retrieval["passkey"]
    (first, *others), read = result.cells, replace(result.cells[1].samples[0], first_choice=True)
    right = replace(first, samples=(replace(first.samples[0], correct=True, output="7"),))
    changed = replace(result, cells=(right, replace(others[0], samples=(read,)), *others[1:]))
    scores = replace(row.scores, retrieval={"passkey": changed})
    rows = [replace(one, scores=scores) if one is row else one for one in checked.rows]
    page = Page(kv_report.page(replace(checked, rows=tuple(rows))))
    cells = next(cells for cells in page.rows if cells[0][1].strip() == "int4-token")
    assert cells[4][1] == "0.50first choice 0.50"
    few = [[text.strip() for _, text in cells] for cells in page.rows if cells[0][1].strip() == "default: int4-token"]
    assert [one[1:3] + one[-1:] for one in few] == [["40", "100 %", "wrong"], ["40", "0 %", "right"]]
    assert few[1][5] == '"7"'


def test_what_is_unsafe_is_named(checked, undrawn):
    check = unsafe(checked)
    page = Page(kv_report.page(check))
    kinds = [kind for cells in page.rows for kind, _ in cells]
    assert {"safe", "unsafe", "undecided"} <= set(kinds)
    blamed = next([text for _, text in cells] for cells in page.rows if cells[0][1] == "a" and cells[1][1] == "m")
    assert blamed[:6] == ["a", "m", "4, 8", "0-1", "3", "they carry half of the logit error"]
    spoilt = error(0, 0.9, direct=0.1, induced=0.8, pair=[[1.0] * 8] * 2)
    rows = by_hand("none", BASE), by_hand("a", off(0.5, 0.5, 0.51, 0.5), errors=[spoilt])
    long = unsafe(checked, rows=rows)
    radius = torch.ones(2, 8)
    radius[:, 5] = 90
    key = replace(checked.captures["default"].layers[0].key, mean=torch.cat([radius, torch.zeros(2, 8)], 1).double())
    layers = [replace(layer, key=key) for layer in checked.captures["default"].layers]
    captured = replace(checked.captures["default"], layers=tuple(layers))
    text = "".join(Page(kv_report.page(replace(long, captures={"m": captured}))).text)
    assert "long keys there cost other pairs 70 % of the logit error" in text
    assert "pair 5, whose long keys cost other pairs 70% of the logit error" in text


def test_hostile_names_infinities_and_nothing_to_attribute(checked, undrawn):
    evil = "<script>&$x$"
    text = kv_report.page(unsafe(checked, evil, model=evil, text=evil))
    assert "<script" not in text and "".join(Page(text).text).count(evil) >= 5
    one = unsafe(checked, rows=(by_hand("none", [1.0]), by_hand("a", [900.0], errors=errors())))
    page_text = "".join(Page(kv_report.page(one)).text)
    assert not re.search(r"\b(nan|inf|None)\b", page_text) and "+∞ %" in page_text
    assert "there is nothing to attribute" in page_text
    bare = [replace(item, direct=torch.full((2,), math.nan), induced=torch.full((2,), math.nan)) for item in errors()]
    quiet = unsafe(checked, rows=(by_hand("none", BASE), by_hand("a", BASE, errors=bare)))
    assert "No head has outlier pairs" in "".join(Page(kv_report.page(quiet)).text)


@pytest.fixture(scope="module")
def unrounded(folder):
    """A scheme that rounds nothing of 40 tokens, and one that rounds no key."""
    model, tokenizer = rope_patch.load(folder), AutoTokenizer.from_pretrained(folder)
    return check_cache(model, tokenizer, ["kivi-2", "k=none;v=int2.token"], lengths=[40], **{**ASKED, "windows": 1})


@pytest.mark.parametrize(("schemes", "missing"), [((1,), (True, True)), ((2,), (True, False)), ((1, 2), (True, False))])
def test_figures_without_an_error_are_left_out(unrounded, schemes, missing):
    check = replace(unrounded, rows=tuple(unrounded.rows[i] for i in (0, *schemes)))
    page = Page(kv_report.page(check))
    page_text = "".join(page.text)
    sentences = "No key is rounded at 40 tokens: there is no err", "Nothing is rounded at 40 tokens: there is no err"
    assert tuple(sentence in page_text for sentence in sentences) == missing
    assert len(page.all("img")) == 5 - sum(missing)


def test_what_rounds_nothing_is_told_from_what_is_undecided(unrounded, undrawn):
    page = Page(kv_report.page(unrounded))
    verdicts = {cells[0][1].strip(): cells[-1] for cells in page.rows[2:4]}
    assert verdicts["kivi-2"] == ("undecided", "undecidedrounds nothing")
    assert verdicts["k=none;v=int2.token"][1] in ("safe", "unsafe", "undecided")
    page_text = "".join(page.text)
    assert (
        "kivi-2 rounds nothing at 40 tokens" in page_text and "where it says so, the scheme rounds nothing" in page_text
    )


def test_what_precision_means_is_said(unrounded, undrawn):
    page_text = "".join(Page(kv_report.page(unrounded)).text)
    assert "Scales and zero points are float32, also where the model computes in half precision" in page_text
    assert (
        "by the model’s own attention, a scheme by this package’s" in page_text
        and "1e-4 nats/token (KL) are noise" in page_text
    )


def test_models_with_two_kinds_of_layers(tmp_path, folder, undrawn):
    check = check_cache(small("gemma3"), AutoTokenizer.from_pretrained(folder), ["int4-token"], lengths=[40], **ASKED)
    page_text = "".join(Page(kv_report.page(check)).text)
    assert "default: full_attention, 64 tokens" in page_text and "default: sliding_attention, 16 tokens" in page_text


# --- the command


def command(*arguments):
    result = CliRunner().invoke(cli.app, ["kv-check", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "a.txt"
    path.write_text(TEXT)
    words = (
        "--lengths",
        "40 56",
        "--windows",
        3,
        "--samples",
        1,
        "--depths",
        "0,1",
        "--haystack",
        "noise",
        "--text",
        path,
    )
    return ("--schemes", " ".join(SCHEMES), "--methods", "default p_rope:p=0.5", *words)


def test_the_command_writes_what_it_says(folder, checked, given, tmp_path):
    out = tmp_path / "deep" / "out"
    printed = command(folder, *given, "-o", out)
    assert {path.name for path in out.iterdir()} == {"finished.jsonl", "kv-check.csv", "kv-check.html", "kv-check.json"}
    data = json.loads((out / "kv-check.json").read_text())
    assert data["rows"] == json.loads(checked.to_json())["rows"] and data["text"] == "a.txt"
    for sentence in checked.summary():
        assert " ".join(sentence.split()) in " ".join(printed.split())
    assert "3 windows of 56 tokens, which do not overlap" in printed and "not packed" in printed
    (few,) = [one for _, one in shortest_of_each(checked.named_scores())]
    assert f"(exact match), as in:\n  default: full precision, {few}\n" in printed and "(wrong)" in str(few)
    assert "wrote kv-check.json, kv-check.csv, kv-check.html" in printed
    lines = list(csv.DictReader(io.StringIO((out / "kv-check.csv").read_text())))
    table = checked.table()
    assert len(lines) == len(table) == 16
    for line, expected in zip(lines, table, strict=True):
        assert list(line) == list(expected)
        for name, value in expected.items():
            cell = " ".join(map(str, value)) if isinstance(value, tuple) else "" if value is None else str(value)
            assert line[name] == cell
    before = (out / "finished.jsonl").read_bytes()
    again = command(folder, *given, "-o", out, "--no-report", "--json")
    assert json.loads(again) == data and (out / "finished.jsonl").read_bytes() == before


def test_packed_caches_are_shown(folder, tmp_path):
    asked = ("--schemes", "fp8", "--lengths", "40", "--windows", 2, "--samples", 1, "--depths", "0", "-o", tmp_path)
    printed = command(folder, *asked, "--packed", "fp8")
    (item,) = json.loads((tmp_path / "kv-check.json").read_text())["packed"]
    assert item["name"] == "fp8" and item["tokens"] == 40 + 128 and 0.25 < item["stored"] / item["full"] < 0.26
    assert "packed fp8: " in printed and "for 168 tokens (0.25 x)" in printed
    page_text = "".join(Page((tmp_path / "kv-check.html").read_text()).text)
    assert "Packed caches" in page_text and "At 168 tokens." in page_text and "packed ones beside it" in page_text
    (tmp_path / "kv-check.json").unlink()
    result = CliRunner().invoke(cli.app, ["kv-check", str(folder), *map(str, asked), "--packed", "fp9"])
    assert "unknown packed cache 'fp9'" in str(result.exception) and not (tmp_path / "kv-check.json").exists()


def test_a_page_that_fails_costs_nothing(folder, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ValueError("no such figure")

    monkeypatch.setattr(kv_report, "write", fail)
    asked = ("--schemes", "fp8", "--lengths", "40", "--windows", 2, "--samples", 1, "--depths", "0", "-o", tmp_path)
    result = CliRunner().invoke(cli.app, ["kv-check", str(folder), *map(str, asked)])
    assert str(result.exception) == "no such figure" and "default at 40 tokens: fp8" in result.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"finished.jsonl", "kv-check.csv", "kv-check.json"}
    result = CliRunner().invoke(cli.app, ["kv-check", str(folder), *map(str, asked), "--json"])
    assert result.exception is not None and json.loads(result.stdout)["lengths"] == [40]


def test_the_command_asks_in_the_mode_that_it_is_given(folder, tmp_path):
    asked = ("--schemes", "fp8", "--lengths", 80, "--windows", 1, "--samples", 1, "--depths", "0 1")
    asked += ("--haystack", "noise", "--tasks", "niah", "--mode", "multikey")
    command(folder, *asked, "-o", tmp_path)
    assert json.loads((tmp_path / "kv-check.json").read_text())["spec"]["mode"] == "multikey"
    assert "niah, mode multikey; lengths 80 tokens" in "".join(Page((tmp_path / "kv-check.html").read_text()).text)


def test_an_adapter_is_named_with_its_patch_and_one_is_singular(folder, tmp_path):
    import peft

    model = rope_patch.load(folder)
    rope_patch.apply(model, "yarn:factor=4")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))
    rope_patch.checkpoints.save(adapted, tmp_path / "tuned")
    asked = ("--schemes", "kivi-2", "--lengths", "40", "--windows", 1, "--samples", 1, "--depths", "0")
    printed = command(tmp_path / "tuned", *asked, "-o", tmp_path / "out")
    data = json.loads((tmp_path / "out" / "kv-check.json").read_text())
    patch = data["methods"]["default"]
    assert data["model"] == "tuned" and patch["patch"] == "yarn:factor=4"
    assert "default: yarn:factor=4, as loaded\n" in printed and "tuned at 40 tokens" in printed
    page_text = "".join(Page((tmp_path / "out" / "kv-check.html").read_text()).text)
    assert "Quantized caches: tuned" in page_text and "default: yarn:factor=4, as loaded" in page_text
    assert f"default: {patch['tables']['all']}" in page_text
    assert "\n1 window of 40 tokens; " in printed and "kivi-2 rounds nothing at 40 tokens" in printed
    assert "rounds nothing  " in printed and "undecided" not in printed
    assert "1 window of 40 tokens, read in one pass" in page_text and "1 sample at each" in page_text
    assert not re.search(r"\b1 (windows|samples|tokens|prompts)\b", printed + page_text)


def test_help_and_list_name_every_preset():
    printed = command("--list")
    helped = " ".join(command("--help").replace("│", " ").split())
    for name, preset in PRESETS.items():
        assert name in printed and preset.text in printed and name in helped
    assert "4.25" in printed and "arXiv:2402.02750" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--schemes", "kivi2"), "Did you mean 'kivi-2'"),
        (("--schemes", "fp8 k=int4.token;v=int4.tokn"), r"\n  k=int4.token;v=int4.tokn\n {22}\^{4}\n"),
        (("--schemes", "none"), "at least one scheme beside none"),
        (("--methods", "prope"), "Did you mean 'p_rope'"),
        (("--lengths", "4 k"), "k"),
        (("--lengths", ""), "lengths is empty"),
        (("--depths", "half"), "a depth is a number"),
        (("--depths", "2"), "2"),
        (("--dtype", "int3"), "dtype must be one of"),
        (("--tasks", "key"), "key"),
        (("--mode", "several"), "unknown mode 'several'. Known: single, multikey"),
        (("--text", "/nowhere"), "nowhere"),
        (("--haystack", "/nowhere"), "nowhere"),
        (("--context", "far"), "far"),
        (("--schemes", "fp8 nf4 fp8.tensor"), "'fp8' and 'fp8.tensor' both mean"),
        (("--tolerance", "-1"), "tolerance must be >= 0, got -1"),
        (("--schemes", "int4-token;skip=7"), "layers 0 to 1"),
    ],
)
def test_wrong_words(folder, given, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.setattr(
        sys, "argv", ["rope-patch", "kv-check", *map(str, (folder, *given, *words, "-o", tmp_path / "out"))]
    )
    with pytest.raises(SystemExit) as stop:
        cli.main()
    stderr = capsys.readouterr().err
    assert stop.value.code == 2 and re.search(message, stderr) and "Traceback" not in stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--context", "0"), "context must be >= 1 token, got 0"),
        (("--context", "-5"), "a length is a number of tokens"),
        (("--windows", "0"), "windows >= 1"),
        (("--tolerance", "-1"), "tolerance must be >= 0, got -1"),
        (("--schemes", "int4.token k=int4.token;v=int4.token"), "'int4.token' and 'k=int4.token;v=int4.token' both"),
        (("--device", "cuda:99"), "no device 'cuda:99'"),
        (("--device", "gpu"), "device must be auto, cpu, cuda"),
        (("--device", "meta"), "no device 'meta' to compute on"),
    ],
)
def test_what_cannot_be_done_is_refused_before_loading(folder, given, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.setattr("rope_patch.cli.kv_check.load_tokenizer", lambda *_: pytest.fail("a tokenizer was loaded"))
    assert_refused(monkeypatch, capsys, ("kv-check", folder, *given, *words, "-o", tmp_path / "deep" / "out"), message)
    assert not (tmp_path / "deep").exists()


def assert_refused(monkeypatch, capsys, arguments, message):
    """The command fails in one line, as for other words that are wrong."""
    monkeypatch.setattr(sys, "argv", ["rope-patch", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    stderr = capsys.readouterr().err
    assert stop.value.code == 2 and stderr.startswith("error: ") and stderr.count("\n") == 1 and message in stderr


@pytest.mark.parametrize(
    "existing", ["file", "file/out", "out/kv-check.html/", "out/kv-check.csv/", "out/finished.jsonl/"]
)
def test_output_that_cannot_be_written_is_refused_before_loading(
    folder, given, tmp_path, monkeypatch, capsys, existing
):
    monkeypatch.setattr("rope_patch.cli.kv_check.load_tokenizer", lambda *_: pytest.fail("a tokenizer was loaded"))
    if existing.endswith("/"):
        (tmp_path / existing).mkdir(parents=True)
    else:
        (tmp_path / "file").touch()
    out = tmp_path / ("out" if existing.endswith("/") else existing)
    message = {"file": "is a file", "file/out": "cannot write into"}.get(existing, "is a folder: remove it")
    assert_refused(monkeypatch, capsys, ("kv-check", folder, *given, "-o", out), message)
    assert len(list(tmp_path.rglob("*"))) == (2 if existing.endswith("/") else 1)


def test_a_folder_made_for_nothing_goes_again(tmp_path, monkeypatch):
    out = tmp_path / "deep" / "out"
    with pytest.raises(ZeroDivisionError), folder_to_write(out, []):
        assert out.is_dir() and all("rope-patch" in path.name for path in out.iterdir())
        1 / 0  # noqa: B018
    assert not (tmp_path / "deep").exists()
    with pytest.raises(ZeroDivisionError), folder_to_write(out, []):
        (out / "kept").touch()
        1 / 0  # noqa: B018
    assert (out / "kept").exists()
    with folder_to_write(tmp_path / "deep", []):
        (out / "kept").unlink()
        out.rmdir()
    assert (tmp_path / "deep").exists()  # it was there before

    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("rope_patch.files.os.open", denied)
    denial = pytest.raises(OSError, match=r"^cannot write into '.*new': Permission denied$")
    with denial, folder_to_write(tmp_path / "new", []):
        pytest.fail("it went on")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("source", ["./nowhere", "~/nowhere", "/no/where", "no/where/else", "nowhere", "no/where"])
def test_a_missing_folder_is_called_one(given, tmp_path, monkeypatch, capsys, source):
    unlike_an_id = source.startswith((".", "~", "/")) or source.count("/") > 1
    message = f"no folder {source}" + (
        ": give a folder with" if unlike_an_id else ", and the hub gives no tokenizer of that name"
    )
    assert_refused(monkeypatch, capsys, ("kv-check", source, *given, "-o", tmp_path / "out"), message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words",
    [("analyze", "-o", "out"), ("compare", "--methods", "default", "--lengths", "40", "-o", "out")],
    ids=lambda words: words[0],
)
def test_other_commands_check_the_device_too(folder, tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    asked = (words[0], folder, *words[1:], "--device")
    assert_refused(monkeypatch, capsys, (*asked, "cuda:99"), "no device 'cuda:99'")
    assert_refused(monkeypatch, capsys, (*asked, "gpu"), "device must be auto")
    assert not list(tmp_path.iterdir())


def test_ctrl_c_keeps_what_was_finished(folder, given, tmp_path, monkeypatch, capsys):

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("rope_patch.evaluation.suite.retrieval", stop)
    arguments = ["rope-patch", "kv-check", *map(str, (folder, *given, "-o", tmp_path / "out"))]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as raised:
        cli.main()
    assert raised.value.code == 130
    stderr = capsys.readouterr().err
    assert f"Finished work is saved in {tmp_path / 'out' / 'finished.jsonl'}" in stderr and "interrupted" in stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["finished.jsonl"]
