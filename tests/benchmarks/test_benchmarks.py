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

FOLDER = Path(__file__).parents[2] / "benchmarks"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FOLDER.is_dir(), reason="not in the source distribution")]


def run(name: str, tmp_path: Path, *more: str, against: str = "lm_eval") -> dict[str, Any]:
    """Run a benchmark at its quick size and return its report, which names the version of what ours is held against."""
    output, log = tmp_path / f"{name}.json", tmp_path / f"{name}.txt"
    command = [str(FOLDER / f"{name}.py"), "--quick", "-o", str(output), *more]
    with log.open("w") as file:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        status = subprocess.run([sys.executable, *command], env=environment, stderr=file, check=False).returncode
    assert status == 0, log.read_text()[-3000:]
    report = json.loads(output.read_text())
    assert {"benchmark", "command", "what", "settings", "environment"} <= report.keys()
    assert report["benchmark"] == name
    assert report["command"].startswith(f"python benchmarks/{name}.py --quick")
    assert {"torch", "transformers", against, "rope_patch", "threads", "device"} <= report["environment"].keys()
    return report


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads its memory from Linux's /proc")
def test_perplexity_memory(tmp_path: Path) -> None:
    report = run("perplexity_memory", tmp_path)
    assert report["summary"]["largest_loss_difference"] < 1e-4
    assert {(row["side"], row["tokens"]) for row in report["memory"]} == {
        (side, tokens) for side in ("lm_eval", "one_pass", "chunked") for tokens in (256, 512)
    }
    # Keys and values, 2 layers, 1 head of 32, float32.
    shown = {row["tokens"]: row["cache_mb"] for row in report["memory"] if row["side"] == "chunked"}
    assert shown[512] == pytest.approx(2 * 2 * 1 * 32 * 4 * 512 / 1e6, abs=0.05)


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads its memory from Linux's /proc")
def test_train_step(tmp_path: Path) -> None:
    report = run("train_step", tmp_path, against="accelerate")
    summary = report["summary"]
    assert summary["largest_loss_difference"] < 1e-5
    assert summary["bar_reached"]["gradients"] and summary["largest_relative_gradient_difference"] < 1e-5
    # Whole logits in the backward pass: their log-softmax, and the gradients of both.
    peaks = {row["side"]: row["peak_mb"] for row in report["loss_path"]["memory"]}
    tokens, vocabulary = report["settings"]["tokens"], report["shape"]["vocab"]
    assert peaks["stock"] == pytest.approx(3 * tokens * vocabulary * 4 / 1e6, rel=0.15)
    assert peaks["ours_128"] < peaks["stock"] / 5
    # Query, key, value and output of 2 layers, two matrices each, none of them without a gradient.
    assert report["step"]["gradients"]["tensors"] == 2 * 4 * 2
    assert report["step"]["gradients"]["smallest_tensor_maximum"] > 0
