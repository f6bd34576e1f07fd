"""The report of a comparison: every score in its place, a winner only where there is one."""

import dataclasses
import math
import re

import pytest
from support.evaluated import result_of, retrieval_of
from support.report_pages import DEPTHS, LENGTHS, Page, accessible, loads_nothing, row

from rope_patch.evaluation.compare import Comparison, Row
from rope_patch.evaluation.metrics import METRICS, Span, change_sentence
from rope_patch.evaluation.tasks import members
from rope_patch.reports import comparison as report
from rope_patch.runtime import plots
from rope_patch.runtime.page import render

NOTHING = {(length, depth): 0 for length in LENGTHS for depth in DEPTHS}
GOOD = row("good", [1.0, 1.1, 1.05, 1.0])
BAD = row("bad", [3.0, 3.1, 3.05, 3.0], NOTHING, table=(0.5, 0.0))
NEAR = row("near", [1.01, 1.09, 1.04, 1.02])
UNPATCHED = row("default", [3.0, 3.1, 3.05, 3.0], NOTHING)


def comparison(*rows, **fields):
    given = {"model": "TinyForCausalLM tiny", "environment": {"torch": "2"}, **fields}
    return Comparison(rows, rows[0].scores.spec, 4, "ab" * 32, "a text", **given)


def shown(*rows, **fields):
    return Page(render(report.page([comparison(*rows, **fields)])))


def test_the_page_is_whole_and_loads_nothing():
    text = render(report.page([comparison(GOOD, BAD), comparison(GOOD, NEAR, model="Second")]), "rope-patch x")
    loads_nothing(text)
    accessible(text)
    page = Page(text)
    assert len(page.all("img")) == 2 * 2  # curves and retrieval
    facts = dict(row for row in page.table("What was measured")[1:])
    assert facts["Retrieval"].startswith("passkey; lengths 4, 8 tokens") and "seed 7" in facts["Retrieval"]
    assert facts["Special tokens"].endswith(": 0, 5")


@pytest.mark.usefixtures("figures")
class TestNumbers:
    """Figures are left out."""

    def test_a_winner_is_marked_only_where_there_is_one(self):
        page = shown(GOOD, BAD)
        assert [kind for kind, _ in page.row("good")][:6] == ["", *["winner"] * 5]
        assert {kind for kind, _ in page.row("bad")} == {""}
        page = shown(BAD, GOOD, NEAR)
        for method, kinds in {"bad": [""] * 5, "good": ["tied"] * 5, "near": ["tied"] * 5}.items():
            assert [kind for kind, _ in page.row(method)][1:6] == kinds
        page = shown(GOOD, NEAR)  # which the intervals do not tell apart: signs would say that both are good
        assert {kind for kind, _ in page.row("good")} == {""}

    def test_scores_and_differences(self):
        page = shown(GOOD, BAD)
        good, bad = page.table("Scores")[1:]
        assert good[1] == f"★ {math.exp(1.0375):.2f}"
        assert good[3] == "★ 1.000.54 to 1.00"  # six haystacks, all right: .541^6 = .025
        assert bad[3] == "0.000.00 to 0.46"
        (worse,) = page.table("Change from good")[1:]
        assert worse[1] == "+638.9 %+638.9 % to +638.9 %"  # every window the same two nats apart
        assert worse[3].startswith("−1.00−1.00 to −0.")

    def test_one_method_has_nothing_to_be_compared_with(self):
        page = shown(row("alone", [1.0], lengths=(8,)))
        assert {kind for kind, _ in page.row("alone")} == {""}
        assert not [name for name in page.tables if name.startswith("Change")]

    def test_no_end_and_no_value(self):
        page = shown(row("a", [1.0]), row("b", [2.0]), row("never", [math.inf]))
        words = "".join(page.text)
        assert "no interval" in words and "no value is finite: never" in words
        assert not re.search(r"\b(nan|inf|None)\b", words)
        assert page.row("never")[1] == ("", "∞")
        assert "No method has a finite perplexity" in "".join(shown(row("x", [math.inf, math.inf])).text)

    def test_the_answer_does_not_call_a_patched_model_unpatched(self):
        patched = dataclasses.replace(comparison(UNPATCHED, GOOD), environment={"patch before": "yarn:factor=4"})
        words = render(report.page([patched]))
        assert "the model as it was given (yarn:factor=4) has 20.85" in words and "unpatched model has" not in words

    def test_the_first_sentence_names_the_price_of_the_best(self):
        """Over all positions within the trained 4 tokens, with its interval over the windows."""
        compared = comparison(UNPATCHED, GOOD)
        price = compared.difference(GOOD.label, "default", "perplexity", Span(4, 0))
        first = report.summary(compared, compared.columns())[0]
        assert change_sentence(METRICS["perplexity"], price) in first and "price" in first

    def test_the_answer_names_nothing_best_where_a_value_is_no_number(self):
        words = "".join(shown(row("default", [math.nan] * 4), GOOD).text)
        assert "Perplexity at positions 4" not in words and "Retrieval in prompts of 8 tokens" in words


# --- figures ---------------------------------------------------------------------------------------------------------


def test_cells_of_the_map_land_where_they_belong(figures):
    shown(row("m", [1.0], {(8, 0.5): 3, (4, 1.0): 0}), row("other", [1.0]))
    first, second, _ = figures[1].axes
    assert first.images[0].get_array().tolist() == [[1, 1], [1, 0.5], [0, 1]]  # depths down, lengths across
    assert second.images[0].get_array().tolist() == [[1, 1], [1, 1], [1, 1]]
    printed = {text.get_position(): text for text in first.texts}
    assert printed[1, 1].get_text() == "0.50"
    assert (printed[0, 2].get_text(), printed[0, 2].get_color()) == ("0.00", "white")
    assert first.get_title(loc="left") == "m"
    assert [label.get_text() for label in first.get_yticklabels()] == ["0 %", "50 %", "100 %"]
    assert [label.get_text() for label in second.get_xticklabels()] == ["4", "8"]


def test_a_suite_has_one_curve_of_its_mean_and_one_map_of_its_needles(figures):
    shares = {(4, 0.0): 6, (4, 1.0): 3, (8, 0.0): 0, (8, 1.0): 6}
    hits = {place: [i < right for i in range(6)] for place, right in shares.items()}
    result = result_of(None, *(retrieval_of(hits, task) for task in members("ruler")))
    made = Comparison((Row("m", result, ()),), result.spec, 4, "", "")
    page = Page(render(report.page([made])))
    assert len(page.all("img")) == 2
    curve, needles = figures[-2:]
    (line,) = (line for line in curve.axes[0].lines if len(line.get_xdata()) == 2 and line.get_marker() == "o")
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([4, 8], [0.75, 0.5])
    assert needles.axes[0].images[0].get_array().tolist() == [[1, 0], [0.5, 1]]


def test_no_map_is_drawn_where_each_length_has_one_depth(monkeypatch):
    monkeypatch.setattr("support.report_pages.DEPTHS", (0.5,))
    assert len(shown(row("m", [1.0])).all("img")) == 1  # the curves


def test_curves_mark_the_trained_length_where_they_get_there():
    curves = {"m0": ([1.0, 2.0], [3.0, 4.0])}
    (axes,) = plots.perplexity_by_position(curves, trained_length=10**6, title="t").axes
    assert axes.get_xlim()[1] < 20 and len(axes.lines) == 1
