"""``--write``: the rows of the families go into benchmarks/results/families.json, with the versions."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from family_models import TYPES

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "families.json"
ROWS: dict[str, dict[str, Any]] = {}


@pytest.fixture(scope="session")
def committed(pytestconfig):
    """The rows of the file by type; None where it is written."""
    if pytestconfig.getoption("write", False):
        return None
    return {row["type"]: row for row in json.loads(RESULTS.read_text())["results"]}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect the rows, which come from other processes under xdist."""
    ROWS.update((row["type"], row) for name, row in report.user_properties if name == "row")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the rows of the families that ran; the others keep theirs, as long as the versions are the same."""
    if not session.config.getoption("write", False) or hasattr(session.config, "workerinput"):
        return
    from measuring import environment, write  # not in the source distribution

    report = json.loads(RESULTS.read_text())
    rows = {row["type"]: row for row in report["results"]} | ROWS
    report["results"] = [rows[kind] for kind in TYPES if kind in rows]
    versions = environment("peft")
    if len(ROWS) < len(TYPES) and versions["transformers"] != report["environment"]["transformers"]:
        pytest.exit("nothing is written: under another transformers every family must run", returncode=1)
    report |= {"counts": dict(Counter(row["result"] for row in report["results"])), "environment": versions}
    write(report, RESULTS)
