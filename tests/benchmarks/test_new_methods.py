"""The table of newer methods: the page shows what was measured."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("not in the source distribution", allow_module_level=True)


def row(one):
    """A row of results, as the page writes it."""

    def cell(score):
        text = f"{score['perplexity']:.2f}"
        if not one["method"].startswith("yarn") or "+" in one["method"]:
            change = [100 * math.expm1(x) for x in (score["nll_minus_yarn"], *score["interval"])]
            text += ", {:+.1f} % ({:+.1f} to {:+.1f})".format(*change)
        return text

    found, asked = one["passkeys"]
    cells = (f"{one['checkpoint']} {one['factor']}×", f"`{one['method']}`", cell(one["within"]), cell(one["beyond"]))
    return f"| {' | '.join(cells)} | {found} of {asked} |"


def test_the_page_holds_what_was_measured():
    rows = json.loads((ROOT / "benchmarks" / "results" / "new_methods.json").read_text(encoding="utf-8"))["rows"]
    page = (ROOT / "docs" / "study.md").read_text(encoding="utf-8")
    assert len(rows) == 32
    assert [one["method"] for one in rows if row(one) not in page] == []
