"""The page on model families says what its JSON says, and three types still do what it says of them."""

from __future__ import annotations

import importlib
import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.fresh import run_code
from support.subsets import needs_transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
LIVE = ("llama", "gpt2", "qwen2")
RELOAD = "import json, sys, families; print(json.dumps([families.reload_folders(folder) for folder in sys.argv[1:]]))"
pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="not in the source distribution")


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return json.loads((BENCHMARKS / "results" / "families.json").read_text())


def table(heading: str) -> list[list[str]]:
    """Return the rows of the page's table whose first column has this heading."""
    lines = (ROOT / "docs" / "families.md").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |")) + 2
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start:])
    return [[cell.strip(" `") for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def test_the_page_counts_the_results(report: dict[str, Any]) -> None:
    counted = Counter(row["result"] for row in report["results"])
    assert {result: int(count) for result, count, _ in table("result") if count != "0"} == counted == report["counts"]


def test_the_page_gives_every_type_its_result(report: dict[str, Any]) -> None:
    text = (ROOT / "docs" / "families.md").read_text()
    found = {name: result for name, result, _ in table("type")}
    for heading, names in re.findall(r"^## (.*)\n\n(`.*`)$", text, re.MULTILINE):
        found |= dict.fromkeys(re.findall(r"`([^`]*)`", names), heading.lower())
    assert found == {row["type"]: row["result"] for row in report["results"]}


@needs_transformers("5.24", "the page counts the types of 5.24")
def test_every_type_is_one_of_transformers(report: dict[str, Any]) -> None:
    types = [row["type"] for row in report["results"]]
    assert len(types) == len(set(types)) > 150
    assert set(types) <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_a_type_works_only_if_no_check_fails(report: dict[str, Any]) -> None:
    for row in report["results"]:
        states = set(row["checks"].values())
        assert len(row["checks"]) == 10
        assert (row["result"] == "works") == (states <= {"passes", "left out"}), row["type"]
        assert row["reason"] or row["result"] == "works", row["type"]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # they are no part of the result
def test_three_types_do_what_the_page_says(report: dict[str, Any], tmp_path: Path) -> None:
    families, checks = importlib.import_module("families"), importlib.import_module("family_checks")
    reports = {}
    for model_type in LIVE:
        (tmp_path / model_type).mkdir()
        reports[model_type] = checks.run_checks((model_type, str(tmp_path / model_type)))
    done = run_code(RELOAD, *(tmp_path / model_type for model_type in LIVE), cwd=BENCHMARKS)
    assert done.returncode == 0, done.stderr
    problems = json.loads(done.stdout)
    live = [families.conclude(name, reports[name], each) for name, each in zip(LIVE, problems, strict=True)]
    recorded = {row["type"]: row for row in report["results"]}
    assert live == [recorded[name] for name in LIVE]
    assert [row["result"] for row in live] == ["works", "no rotary table", "works"]
