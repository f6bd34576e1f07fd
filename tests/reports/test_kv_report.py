"""The page of ``rope-patch kv-check``."""

import math
import re
from dataclasses import replace

import pytest
from support.evaluated import check_cache
from support.kv_rows import BASE, by_hand, off
from support.prompting import ENGLISH, TOKENIZER
from support.report_pages import Page, accessible, loads_nothing
from support.tiny import small

from rope_patch.evaluation.metrics import METRICS, Span
from rope_patch.reports import kv as kv_report
from rope_patch.runtime.page import render

FORMATS = ["int4-token", "k=int2.token8;v=int8.token", "kivi-2"]
ASKED = {"windows": 3, "samples": 1, "haystack": "noise", "depths": (0.0, 1.0), "text": ENGLISH}


@pytest.fixture(scope="module")
def checked():
    check = check_cache(small(), TOKENIZER, FORMATS, methods=["default", "p_rope:p=0.5"], lengths=[40, 56], **ASKED)
    return replace(check, model="tiny")


def shown(check):
    return Page(render(kv_report.page(check)))


def of_rows(checked, *rows):
    """A check of one method with rows that were made by hand."""
    captures = {"m": checked.captures["default"]}
    return replace(checked, rows=rows, spec=rows[0].scores.spec, captures=captures)


# --- the page --------------------------------------------------------------------------------------------------------


def test_the_page_is_whole_and_loads_nothing(checked):
    text = render(kv_report.page(checked), "rope-patch kv-check <x>")
    accessible(text)
    loads_nothing(text)
    page = Page(text)
    words = "".join(page.text)
    assert not page.all("img")
    for sentence in ("rope-patch kv-check <x>", "Quantized caches: tiny", *checked.summary()):
        assert sentence in words
    facts = dict(page.table("What was measured")[1:])
    assert facts["Perplexity"].startswith("3 windows of 56 tokens") and facts["Retrieval"].startswith("passkey; ")
    assert not re.search(r"\b(nan|inf|None)\b", words)


def test_the_tables_have_the_numbers(checked, figures):
    page = shown(checked)
    rows = {row[0]: row for row in page.table("40 tokens")[:5]}
    row = checked.of("default")[1]
    moved_by, low, high = (100 * math.expm1(nats) for nats in checked.change(row, METRICS["perplexity"], Span(40, 0)))

    def text(value):
        return f"{value:+.{2 if abs(value) < 10 else 1}f}".replace("-", "−")

    _, verdict, bits, kl, _, perplexity, moved, answered, *_ = rows["int4-token"]
    assert answered.startswith(f"{row.scores.retrieval['passkey'].accuracy(40):.2f}")
    assert (verdict, bits) == (checked.verdict(row, 40).kind, "6.006.00")
    assert perplexity == f"{row.scores.perplexity.between(0, 40):.0f}"
    assert moved == f"{text(moved_by)} %{text(low)} % to {text(high)} %"
    assert kl == f"{row.divergences[40].kl:.4f}"
    assert rows["kivi-2"][2] == "16.003.50"  # the cache, and what would be quantized of a longer one
    assert page.table("40 tokens")[1][0] == "default: full precision"


def test_what_is_unsafe_is_attributed(checked, figures):
    rows = [by_hand("none", BASE), by_hand("a", off(0.5, 0.51, 0.49, 0.5)), by_hand("ok", BASE, bits=5.0)]
    page = shown(of_rows(checked, *rows, by_hand("b", off(0.1, -0.1, 0.1, -0.1), bits=8.0)))
    assert {row[0]: row[1] for row in page.table("8 tokens")[2:]} == {"a": "unsafe", "ok": "safe", "b": "undecided"}
    (row,) = page.table("Unsafe formats")[1:]
    assert row[:4] == ["m: a", "4, 8", "0.5000", "0.4000"]
    assert row[4:] == [
        "layer 1 0.300, layer 2 0.200, layer 0 0.100",
        "75 % from biases, 5 % from outlier pairs, 20 % from the rest",
    ]
    assert page.table("What helps")[1:] == [
        ["m: a", "rotated keys", "0.0200", "an engine"],
        ["", "another", "0.3000", "–"],
    ]


def test_infinities_are_said_in_words(checked, figures):
    one = of_rows(checked, by_hand("none", [1.0]), by_hand("a", [900.0]))
    words = "".join(shown(one).text)
    assert not re.search(r"\b(nan|inf|None)\b", words) and "over +1000 %" in words
    ok = of_rows(checked, by_hand("none", [1.0]), by_hand("a", [1.0]))
    assert "No format is unsafe." in "".join(shown(ok).text)
