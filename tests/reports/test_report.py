"""The report: one file, every score in its place, a winner only where there is one."""

from __future__ import annotations

import base64
import math
import re

import pytest
import torch
from report_pages import DEPTHS, LENGTHS, Page, row

from rope_patch.evaluation.compare import Comparison
from rope_patch.plots import base as plots
from rope_patch.reports import comparison as report


def comparison(*rows, **fields):
    given = {"trained_length": 4, "text": "ab" * 32, "text_name": "a text", "python_version": None}
    given |= {"model": "Tiny model", "environment": {"torch": "2"}}
    return Comparison(
        rows, rows[0].scores.spec, **{**given, "model": "Tiny model", "environment": {"torch": "2"}, **fields}
    )


NOTHING = {(length, depth): 0 for length in LENGTHS for depth in DEPTHS}
GOOD, BAD = row("good", [1.0, 1.1, 1.05, 1.0]), row("bad", [3.0, 3.1, 3.05, 3.0], NOTHING, table=(0.5, 0.0))
NEAR = row("near", [1.01, 1.09, 1.04, 1.02])


@pytest.fixture
def undrawn(monkeypatch):
    """For tests of words and tables: figures are made, and saving them is left out."""
    monkeypatch.setattr(plots, "svg", lambda figure: "<svg></svg>")


def test_the_page_is_whole_and_loads_nothing():
    text = report.report([comparison(GOOD, BAD), comparison(GOOD, NEAR, model="Second")], command="rope-patch x")
    page = Page(text)
    images = page.all("img")
    assert len(images) == 4 + 3  # curves, exact match, log-probability; wavelengths where they differ
    for image in images:
        kind, _, data = image["src"].partition(",")
        assert kind == "data:image/svg+xml;base64"
        assert b"</svg>" in base64.b64decode(data)
        assert len(image["alt"]) > 40
    for _, attributes in page.tags:
        for name in ("src", "href", "srcset", "action", "data", "background"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))
    assert not page.all("script")
    assert not re.search(r"url\(|@import", text)
    page_text = "".join(page.text)
    for fact in ("rope-patch x", "Tiny model: passkey", "Second: passkey", "trained", "a text", "abababababababab…"):
        assert fact in page_text
    for fact in ("task passkey, mode single", "6 samples at each", "seed 7", "4 windows of 8 tokens", "stride 8"):
        assert fact in page_text
    for fact in ("ids 0, 5", "noise", "torch 2", "Newcombe’s method 10", "Student’s", "Bonferroni", "95 %"):
        assert fact in page_text
    assert {method for cells in page.rows for _, method in cells[:1]} >= {"good", "bad", "near"}
    again = [comparison(GOOD, BAD), comparison(GOOD, NEAR, model="Second")]
    assert text == report.report(again, command="rope-patch x")


def test_tables_are_accessible(undrawn):
    page = Page(report.report([comparison(GOOD, BAD)]))
    assert len(page.all("caption")) == len(page.all("table")) == 5
    assert all(attributes.get("scope") in ("col", "row", "colgroup") for attributes in page.all("th"))
    assert page.all("html") == [{"lang": "en"}]


def test_a_winner_is_marked_only_where_there_is_one(undrawn):
    clear = comparison(GOOD, BAD)
    assert [column.winner for column in clear.columns()] == ["good"] * 4
    page = Page(report.report([clear]))
    assert [kind for kind, _ in page.row("good")] == ["", *["winner"] * 4]
    assert [kind for kind, _ in page.row("bad")] == [""] * 5
    assert all("★" in text for _, text in page.row("good")[1:])

    close = comparison(BAD, GOOD, NEAR)
    assert [column.winner for column in close.columns()] == [None] * 4
    page = Page(report.report([close]))
    assert "winner" not in [attributes.get("class") for attributes in page.all("td")]
    for method, kinds in {"bad": [""] * 4, "good": ["tied"] * 4, "near": ["tied"] * 4}.items():
        assert [kind for kind, _ in page.row(method)][1:] == kinds


def test_scores_and_differences(undrawn):
    page = Page(report.report([comparison(GOOD, BAD)]))
    _, first, _, at_four, _ = [re.sub(r"\s+", " ", text).strip() for _, text in page.row("good")]
    assert first == f"★ {math.exp(1.0375):.2f}"
    assert at_four == "★ 1.000.54 to 1.00"  # six haystacks, all right: .541^6 = .025
    scores, differences = [[text for _, text in cells] for cells in page.rows if cells[0][1].strip() == "bad"][:2]
    assert scores[3].strip() == "0.000.00 to 0.46"
    assert differences[1].strip() == "+2.0000+2.0000 to +2.0000"  # every window the same two nats apart
    assert differences[3].strip().startswith("−1.00−1.00 to −0.")
    assert ("best", "best") in [cells[1] for cells in page.rows]


def test_hostile_names_are_text():
    evil = '<script>alert("1")</script>&$x$'
    text = report.report([comparison(GOOD, row(evil, [2.0] * 4), model=evil, text_name=evil)], title=evil)
    assert "<script" not in text
    page = Page(text)
    assert page.row(evil)
    assert "".join(page.text).count(evil) >= 5


def test_one_method_has_nothing_to_be_compared_with():
    text = report.report([comparison(row("alone", [1.0], lengths=(8,)))])
    page = Page(text)
    assert [kind for kind, _ in page.row("alone")] == ["", "", ""]
    assert "Newcombe" not in text
    assert len(page.all("img")) == 4


def test_no_end_and_no_value():
    one = comparison(row("a", [1.0]), row("b", [2.0]), row("never", [math.inf]))
    page = Page(report.report([one]))
    page_text = "".join(page.text)
    assert "−∞ to +∞" in page_text
    assert not re.search(r"\b(nan|inf|None)\b", page_text)
    assert "Not drawn, since no value is finite: never" in page_text
    assert page.row("never")[1] == ("tied", "≈ ∞")
    page = Page(report.report([comparison(row("x", [math.inf, math.inf]))]))
    assert "No method has a finite perplexity" in "".join(page.text)
    assert len(page.all("img")) == 3


def test_layer_types_long_names_and_joined_tasks():
    both = ("full_attention", "sliding_attention")
    tables = ["+".join(["abf:rope_theta=500000"] * 5 + [f"table:values=1/{i}"]) + "/1" * 30 for i in range(2)]
    rows = [row(name, [1.0, 1.1], layer_types=both, task="vt") for name in tables]
    rows.append(row("nope", [1.0, 1.1], layer_types=both, task="vt", table=(0.0, 0.0)))
    text = report.report([comparison(*rows)])
    page = Page(text)
    page_text = "".join(page.text)
    assert all(name in page_text for name in tables)  # in full, once
    assert max(len(cells[0][1]) for cells in page.rows) < 90
    assert "one independent answer per haystack" in page_text
    assert len(page.all("img")) == 5  # a figure of wavelengths for each layer type
    assert [text for _, text in page.rows[-1][1:6]] == ["sliding_attention", "–", "–", "2 of 2", "1"]
    same = [row(name, [1.0, 1.1], layer_types=both) for name in "ab"]
    assert "In layers of type full_attention every method left the same table." in report.report([comparison(*same)])


def test_twins_stay_two():
    names = ["x" * 200, "x" * 100, "y"]
    assert len(set(report.short_names(names))) == 3
    assert max(map(len, report.short_names(names))) < 90


def test_cells_land_where_they_belong():
    hits = {(8, 0.5): 3, (4, 1.0): 0}
    assert row("m", [1.0], hits).scores.retrieval["passkey"].cells[1].depth == 0.5
    drawn = []
    original = plots.retrieval_heatmap
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "retrieval_heatmap", lambda *a, **k: drawn.append(original(*a, **k)) or drawn[-1])
        report.report([comparison(row("m", [1.0], hits), row("other", [1.0]))])
    exact, logprob = drawn
    first, second, _ = exact.axes
    assert first.collections[0].get_array().tolist() == [[1, 1], [1, 0.5], [0, 1]]  # depths down, lengths across
    assert second.collections[0].get_array().tolist() == [[1, 1], [1, 1], [1, 1]]
    printed = {(text.get_position()[0] - 0.5, text.get_position()[1] - 0.5): text for text in first.texts}
    assert printed[1, 1].get_text() == "0.50"
    assert (printed[0, 2].get_text(), printed[0, 2].get_color()) == ("0.00", "white")
    assert printed[0, 0].get_color() == "black"
    assert first.get_title(loc="left") == "m"
    assert [label.get_text() for label in first.get_yticklabels()] == ["0 %", "50 %", "100 %"]
    assert [label.get_text() for label in second.get_xticklabels()] == ["4", "8"]
    assert first.get_ylim() == (3, 0)
    assert logprob.axes[0].texts[0].get_text() == "−1.5"


def test_of_a_score_below_one_a_wrong_answer_is_shown_first_with_its_length_and_depth(undrawn):
    """At 8 tokens one depth of three is wrong; at 4 all are right."""
    page = Page(report.report([comparison(row("m", [1.0], {(8, 0.5): 0}))]))
    shown = [[text.strip() for _, text in cells] for cells in page.rows if cells[-1][1] in ("right", "wrong")]
    assert shown == [
        ["m", "passkey", "4", "0 %", "12", '"12"', "right"],
        ["m", "passkey", "8", "50 %", "12", '"12"', "wrong"],
        ["m", "passkey", "8", "0 %", "12", '"12"', "right"],
    ]


def test_heat_map_without_a_number():
    figure = plots.retrieval_heatmap(
        {"m": [[-math.inf, -1.0]]}, lengths=(4096, 5), depths=(0.25,), title="t", limits=(-2, 0), digits=1
    )
    assert [text.get_text() for text in figure.axes[0].texts] == ["−∞", "−1.0"]
    assert figure.axes[0].collections[0].get_array().mask.tolist() == [[True, False]]
    assert figure.axes[0].get_xticklabels()[0].get_text() == "4k"


def test_twelve_panels_in_even_rows():
    grids = {f"m{i}": [[0.5] * 3] for i in range(5)}
    figure = plots.retrieval_heatmap(grids, lengths=(1, 2, 3), depths=(0,), title="t")
    rows = [axes.get_subplotspec().rowspan.start for axes in figure.axes[:5]]
    assert rows == [0, 0, 0, 1, 1]


def test_factors_near_one_have_a_scale_with_ticks():
    before = torch.tensor([1.0, 0.1, 0.01])
    for divisor, scale in ((1.05, "linear"), (4.0, "log")):
        drawn = {"default": before, "slower": before / divisor}
        (axes,) = plots.factors_by_wavelength(drawn, before=before, context=100, title="t").axes
        assert axes.get_yscale() == scale and axes.get_ylim()[0] < 1 < divisor < axes.get_ylim()[1]


def test_trained_length_beyond_the_curves_is_not_drawn():
    axes = plots.perplexity_by_position({"m": ([1, 9], [2, 3])}, trained_length=10**6, title="t").axes[0]
    assert axes.get_xlim()[1] < 20
    assert len(axes.lines) == 1


def test_write_is_all_or_nothing(tmp_path, undrawn):
    path = tmp_path / "r.html"
    report.write(path, [comparison(GOOD)], title="one")
    before = path.read_text(encoding="utf-8")
    assert before.startswith("<!DOCTYPE html>")
    with pytest.raises(ValueError, match="at least one comparison"):
        report.write(path, [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            report.write(path, [comparison(GOOD)], title="two")
    assert path.read_text(encoding="utf-8") == before
    assert list(tmp_path.iterdir()) == [path]


def test_figures_have_units_and_every_line():
    curves = {f"m{i}": ([1.0, 2.0], [3.0 + i, 4.0 + i]) for i in range(12)}
    figure = plots.perplexity_by_position(curves, trained_length=2, title="t")
    (axes,) = figure.axes
    assert axes.get_xlabel() == "position [tokens]"
    assert axes.get_legend().get_texts()[0].get_text() == "m0  (4)"
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines[:12]}) == 12
