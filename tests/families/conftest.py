"""``--write``: the rows of all families go into benchmarks/results/families.json, with the versions."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from family_models import TYPES
from measuring import environment, write

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "families.json"
ROWS: dict[str, dict[str, Any]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write", action="store_true", help=f"write {RESULTS.name} in place of comparing with it")


@pytest.fixture(scope="session")
def committed(pytestconfig: pytest.Config) -> dict[str, dict[str, Any]] | None:
    """The rows of the file by type; None where it is written."""
    if pytestconfig.getoption("write", False):
        return None
    return {row["type"]: row for row in json.loads(RESULTS.read_text())["results"]}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect the rows, which come from other processes under xdist."""
    ROWS.update((row["type"], row) for name, row in report.user_properties if name == "row")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the file, unless a family is missing."""
    if not session.config.getoption("write", False) or hasattr(session.config, "workerinput"):
        return
    missing = [kind for kind in TYPES if kind not in ROWS]
    if missing:
        pytest.exit(f"nothing is written: no row of {', '.join(missing)}", returncode=1)
    rows = [ROWS[kind] for kind in TYPES]
    report = {
        "benchmark": "families",
        "command": "python -m pytest tests/families -m full --write",
        "what": "ten checks of every causal language model type, each a tiny random model, under four methods, and doctor",
        "counts": dict(Counter(row["result"] for row in rows)),
        "environment": environment("peft"),
        "results": rows,
    }
    write(report, RESULTS)
