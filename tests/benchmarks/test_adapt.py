"""The study of adapted checkpoints: its statistics by hand, its cells by a quick run, the pages against its JSON."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "adapt.py"
adapt = pytest.importorskip("adapt", reason="not in the source distribution")


def seeds(*shares):
    """Answers of as many seeds: four haystacks of five depths each, of which so many are right."""
    return [[[i < right for i in range(5)] for _ in range(4)] for right in shares]


def test_a_difference_is_paired_and_its_interval_over_seeds_is_students():
    result = adapt.difference(seeds(5, 4, 5), seeds(1, 2, 1))
    assert result["difference"] == pytest.approx((14 - 4) / 15)
    assert result["seeds"] == pytest.approx([0.8, 0.4, 0.8])
    # mean 2/3, standard deviation sqrt(2 (2/15)^2 + (4/15)^2) / sqrt(2) = 0.23094, t(2, .975) = 4.302653
    half = 4.302653 * 0.230940 / math.sqrt(3)
    assert result["interval_seeds"] == pytest.approx([2 / 3 - half, 2 / 3 + half], abs=1e-5)
    low, high = result["interval_prompts"]
    assert 0 < low < result["difference"] < high <= 1
    same = adapt.difference(seeds(3, 3), seeds(3, 3))
    assert same["difference"] == 0 and same["interval_prompts"][0] < 0 < same["interval_prompts"][1]


def test_a_share_knows_that_prompts_of_a_haystack_hang_together():
    mixed = [[[i % 2 == 0 for i in range(4)] for _ in range(6)]]
    split = [[[h % 2 == 0] * 4 for h in range(6)]]  # whole haystacks right or wrong: six answers, not 24
    one, other = adapt.share(mixed), adapt.share(split)
    assert one["exact_match"] == other["exact_match"] == 0.5 and one["prompts"] == other["prompts"] == 24
    assert other["interval"][1] - other["interval"][0] > 1.5 * (one["interval"][1] - one["interval"][0])


@pytest.mark.full
def test_a_quick_study_runs_is_resumed_and_says_what_it_measured(tmp_path):
    def run():
        command = [sys.executable, str(SCRIPT), "--quick", "-o", "out.json", "--workers", "1"]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads((tmp_path / "out.json").read_text()), done.stdout

    report, shown = run()
    assert report["cells_run_now"] == 3 and [row["arm"] for row in report["rows"]] == ["default", "yarn", "yarn-pose"]
    for row in report["rows"]:
        folder = adapt.folder_of(tmp_path / "build" / "adapters-quick", ("llama", row["arm"], 0))
        assert (folder / "adapter_model.safetensors").exists() and (folder / "rope_patch.json").exists()
        evaluation = json.loads((folder / "evaluation.json").read_text())
        right = [x for haystack in adapt.answers(evaluation, 1024) for x in haystack]
        assert len(right) == 10 and row["passkey"]["1024"]["exact_match"] == sum(right) / 10
        assert row["tokens"] == 2 * 4096 and row["arm"] in shown
    again, _ = run()
    assert again["cells_run_now"] == 0 and again["rows"] == report["rows"]


def test_pages_say_what_the_study_measured():
    report = json.loads((ROOT / "benchmarks" / "results" / "adapt.json").read_text())
    assert len(report["rows"]) == 12 and all(row["seeds"] == [0, 1, 2] for row in report["rows"])
    assert all(row["passkey"]["1024"]["prompts"] == 600 for row in report["rows"])
    lines = [line.rstrip() for line in adapt.table(report["rows"]).splitlines()]
    recipes = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    assert "\n".join(lines) in recipes
