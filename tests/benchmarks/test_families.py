"""The page on model families says what its JSON says."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="not in the source distribution")


@pytest.fixture(scope="module")
def report():
    return json.loads((ROOT / "benchmarks" / "results" / "families.json").read_text())


def table(heading):
    """Return the rows of the page's table whose first column has this heading."""
    lines = (ROOT / "docs" / "families.md").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |")) + 2
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start:])
    return [[cell.strip(" `") for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def test_the_page_counts_the_results(report):
    counted = Counter(row["result"] for row in report["results"])
    assert {result: int(count) for result, count, _ in table("result") if count != "0"} == counted == report["counts"]


def test_the_page_gives_every_type_its_result(report):
    text = (ROOT / "docs" / "families.md").read_text()
    found = {name: result for name, result, _ in table("type")}
    for heading, names in re.findall(r"^## (.*)\n\n(`.*`)$", text, re.MULTILINE):
        found |= dict.fromkeys(re.findall(r"`([^`]*)`", names), heading.lower())
    assert found == {row["type"]: row["result"] for row in report["results"]}
