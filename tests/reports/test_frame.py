"""What all reports share: terms that are explained, colours that can be read, a summary that says who is ahead."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path

import pytest
from report_pages import DEPTHS, LENGTHS, Page, accessible, row
from typer.testing import CliRunner

import rope_patch
from rope_patch.cli.app import app
from rope_patch.evaluation.compare import Comparison
from rope_patch.plots import base as plots
from rope_patch.reports import comparison as report
from rope_patch.reports.glossary import Terms, glossary

ROOT = Path(__file__).parents[2]
TEMPLATES = rope_patch.data_path("assets")


def compared(*rows) -> Comparison:
    return Comparison(rows, rows[0].scores.spec, 4, "ab" * 32, "a text", None, model="Tiny model")


NOTHING = {(length, depth): 0 for length in LENGTHS for depth in DEPTHS}
UNPATCHED, GOOD = row("default", [3.0, 3.1, 3.05, 3.0], NOTHING), row("yarn:factor=2", [1.0, 1.1, 1.05, 1.0])
NEAR = row("ntk:factor=2", [1.01, 1.09, 1.04, 1.02])


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    monkeypatch.setattr(plots, "svg", lambda figure: "<svg></svg>")


def summary(*rows) -> str:
    text = report.report([compared(*rows)])
    return re.sub(r"\s+", " ", re.sub("<[^>]*>", "", re.search(r'<p class="summary">(.*?)</p>', text, re.S)[1])).strip()


def test_the_summary_says_what_was_measured_and_who_is_ahead():
    assert summary(UNPATCHED, GOOD) == (
        "2 methods on Tiny model, trained at 4 tokens: perplexity in 4 × 8 tokens of text, and retrieval (passkey) in "
        "prompts of 4, 8 tokens. Perplexity at positions 4–8 tokens: yarn:factor=2 is best (2.82), ahead of every "
        "other method by the intervals; the unpatched model has 20.85. Retrieval in prompts of 8 tokens: yarn:factor=2 "
        "is best (1.00), ahead of every other method by the intervals; the unpatched model has 0.00."
    )


def test_the_summary_separates_nothing_that_the_intervals_do_not():
    assert "the intervals separate no method from the best value (2.82)." in summary(GOOD, NEAR)
    three = summary(UNPATCHED, GOOD, NEAR)
    assert "yarn:factor=2 (2.82) is best, but not separable from ntk:factor=2; the unpatched model has 20.85" in three
    assert summary(GOOD).startswith("One method on") and "Retrieval in prompts of 8 tokens: 1.00." in summary(GOOD)


def test_the_summary_does_not_call_a_patched_model_unpatched():
    patched = dataclasses.replace(compared(UNPATCHED, GOOD), environment={"patch before": "yarn:factor=4"})
    text = report.report([patched])
    assert "the model as it was given (yarn:factor=4) has 20.85" in text and "unpatched model has" not in text


def test_the_summary_names_nothing_best_where_a_value_is_no_number():
    text = summary(row("default", [math.nan] * 4), GOOD)
    assert "Perplexity at positions" not in text and "Retrieval in prompts of 8 tokens" in text


def test_a_term_is_linked_once_and_explained():
    terms = Terms()
    text = "Perplexities <b> of a passkey & passkeys, PERPLEXITY: unrotated pairs"
    assert terms.link(text) == (
        'Perplexities &lt;b&gt; of a <a class="term" href="#term-passkey">passkey</a> &amp; passkeys, '
        '<a class="term" href="#term-perplexity">PERPLEXITY</a>: '
        '<a class="term" href="#term-unrotated-pair">unrotated pairs</a>'
    )
    assert terms.link("perplexity") == "perplexity"
    assert terms.link("yarn:factor=2 and p_rope+depth") == "yarn:factor=2 and p_rope+depth"
    assert (
        terms.link("org/Passkey-Llama-2-7b, needle-7b/model and a_haystack")
        == "org/Passkey-Llama-2-7b, needle-7b/model and a_haystack"
    )
    assert [(term, meaning) for _, term, meaning in terms.used()] == [
        (term, glossary()[term]) for term in ("Passkey", "Perplexity", "Unrotated pair")
    ]


def test_pages_can_be_read_by_keyboard_and_ear(tmp_path):
    text = report.report([compared(UNPATCHED, GOOD, NEAR), compared(GOOD)])
    accessible(text)
    assert "term-passkey" in {given["href"][1:] for given in Page(text).all("a")}
    given = ["theory", "--method", "yarn:factor=2", "--head-dim", "16", "--trained-length", "64", "-o", str(tmp_path)]
    result = CliRunner().invoke(app, given, catch_exceptions=False)
    assert result.exit_code == 0
    (page,) = tmp_path.glob("*.html")
    accessible(page.read_text(encoding="utf-8"))


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="not in the source distribution")
def test_the_page_of_concepts_has_the_same_glossary():
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8").partition("## Glossary")[2]
    page = re.sub(r"\(\[([^\]]*)\]\(https://arxiv.org/abs/([\d.]+)\)\)", r"(\1, arXiv:\2)", re.sub(r"\s+", " ", page))
    found = dict(re.findall(r"- \*\*(.*?)\*\*: (.*?)(?= - \*\*|\s*$)", page))
    assert found == glossary() == json.loads((TEMPLATES / "glossary.json").read_text(encoding="utf-8"))


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2.2."""
    code = colour.lstrip("#")
    code = "".join(2 * digit for digit in code) if len(code) == 3 else code
    parts = [int(code[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_text_has_the_contrast_of_wcag_aa():
    style = "".join((TEMPLATES / name).read_text() for name in ("report.html.jinja", "kv_check.html.jinja"))
    light, dark = {}, {}
    for dark_only, block in re.findall(r"(prefers-color-scheme: dark\) \{\s*)?:root \{([^}]*)\}", style):
        (dark if dark_only else light).update(re.findall(r"--([\w-]+): (#\w+)", block))
    pairs = [("ink", "page"), ("soft", "page"), ("ink", "band"), ("win-ink", "win"), ("lose-ink", "lose")]
    for colours, (text, back) in itertools.product((light, dark), [*pairs, ("open-ink", "open")]):
        bright, dim = sorted((luminance(colours[text]), luminance(colours[back])), reverse=True)
        assert (bright + 0.05) / (dim + 0.05) >= 4.5, (text, back)
    assert light["page"] != dark["page"]
