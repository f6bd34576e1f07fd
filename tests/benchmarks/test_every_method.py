"""The results of every method: none is missing, and what they say of YaRN itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rope_patch.methods import METHODS, parse

ROOT = Path(__file__).parents[2]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("not in the source distribution", allow_module_level=True)


def test_every_method_was_measured_on_both_checkpoints_at_both_factors():
    rows = json.loads((ROOT / "benchmarks" / "results" / "every_method.json").read_text(encoding="utf-8"))["rows"]
    for checkpoint in ("llama", "gemma3"):
        for factor in (4, 8):
            ours = [row for row in rows if (row["checkpoint"], row["factor"]) == (checkpoint, factor)]
            names = {
                step.name for row in ours for step in getattr(parse(row["method"]), "steps", [parse(row["method"])])
            }
            assert names == set(METHODS) - {"longrope", "table"}  # nothing without a list of numbers
            assert [row["method"] for row in ours if row["beyond"]["interval"] is None] == [f"yarn:factor={factor}"]
