"""The benchmarks run at their quick size, say what they should, and both sides agree. Nothing here asserts a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

FOLDER = Path(__file__).parents[1] / "benchmarks"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FOLDER.is_dir(), reason="not in the source distribution")]


def run(name: str, tmp_path: Path) -> dict[str, Any]:
    """Run a benchmark at its quick size and return its report."""
    output = tmp_path / f"{name}.json"
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), "--quick", "-o", str(output)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(output.read_text())
    assert {"benchmark", "command", "what", "summary", "settings", "environment"} <= report.keys()
    assert report["benchmark"] == name
    assert report["command"].startswith(f"python benchmarks/{name}.py --quick")
    assert {"torch", "transformers", "lm_eval", "rope_patch", "threads", "device"} <= report["environment"].keys()
    return report


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads its memory from Linux's /proc")
def test_perplexity_memory(tmp_path: Path) -> None:
    report = run("perplexity_memory", tmp_path)
    assert report["summary"]["largest_loss_difference"] < 1e-4
    assert report["shape"]["vocab"] > 0
    assert {(row["side"], row["tokens"]) for row in report["memory"]} == {
        (side, tokens) for side in ("lm_eval", "one_pass", "chunked") for tokens in (256, 512)
    }
    for row in report["memory"]:
        assert row["peak_mb"] > 0
        assert row["peak_above_cache_mb"] == pytest.approx(row["peak_mb"] - row["cache_mb"], abs=0.2)
    # Keys and values, 2 layers, 1 head of 32, float32.
    shown = {row["tokens"]: row["cache_mb"] for row in report["memory"] if row["side"] == "chunked"}
    assert shown[512] == pytest.approx(2 * 2 * 1 * 32 * 4 * 512 / 1e6, abs=0.05)
    assert [row["tokens"] for row in report["time"]] == [256, 512]
    assert all(row[f"{side}_wall_ratio"]["median"] > 0 for row in report["time"] for side in ("one_pass", "chunked"))
    assert report["alone"]["tokens"] == 1024 and report["alone"]["peak_mb"] > 0


def test_retrieval_grid(tmp_path: Path) -> None:
    report = run("retrieval_grid", tmp_path)
    assert report["summary"]["outputs_identical"] and report["summary"]["outputs_compared"] > 0
    assert {row["mode"] for row in report["results"]} == {"single", "multikey"}
    for row in report["results"]:
        for figure in ("asking", "whole"):
            assert row[figure]["outputs_identical"] and row[figure]["outputs_different"] == 0
            # Every prompt is read whole by lm-eval: its last answer token never is.
            assert row[figure]["lm_eval_tokens"] <= row["prompts"] * (row["length"] - 1)
            assert row[figure]["tokens_ratio"] > 1
        assert row["outputs"] and any(row["outputs"])
