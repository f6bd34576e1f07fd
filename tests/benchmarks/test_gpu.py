"""The suite for a GPU, rehearsed on a CPU: every stage end to end, and numbers by hand."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forks import run_script
from scipy import stats

import rope_patch
from rope_patch.planning import plan, shape_of

FOLDER = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="not in the source distribution")
OPTIONAL = ("bitsandbytes", "datasets", "flash_attn", "gguf", "liger_kernel", "lm_eval", "matplotlib", "omegaconf")


def tiny(folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Rehearse in a fork; returns the report and what was printed."""
    output, log = folder / "gpu.json", folder / "log.txt"
    command = [str(FOLDER / "gpu.py"), "--tiny", "-o", str(output), "--carried", str(folder / "carried"), *options]

    printed = run_script(command, log)
    report: dict[str, Any] = json.loads(output.read_text())
    return report, printed


# --- all of it


@pytest.mark.slow
def test_a_rehearsal_runs_every_stage_once(tmp_path: Path) -> None:
    report, printed = tiny(tmp_path)
    assert list(report["stages"]) == list("abcdefg") and report["tiny"] is True and len(report["runs"]) == 1
    (run,) = report["runs"]
    assert run["command"].startswith("python benchmarks/gpu.py --tiny") and run["precision"].keys() >= {
        "float32_matmul_precision"
    }
    assert run["environment"].keys() >= {"device", "python", "torch", "transformers", "peft", "cuda", "rope_patch"}
    for key, stage in report["stages"].items():
        assert not stage["failed"] and not stage["left"] and stage["cells"], key
        assert not stage["cells"].keys() & stage["skipped"].keys()
        assert all("GPU" in reason or "not installed" in reason for reason in stage["skipped"].values())
    check_numbers({key: stage["cells"] for key, stage in report["stages"].items()}, report)

    again, printed = tiny(tmp_path)
    assert again["stages"] == report["stages"] and again["runs"] == report["runs"]  # nothing was measured twice
    assert " s\n" not in printed and "skipped" in printed


def check_numbers(cells: dict[str, dict[str, Any]], report: dict[str, Any]) -> None:
    """What must hold of the numbers whatever the machine is."""
    for cell in cells["a"].values():
        for method, found in cell.get("hidden_states", {}).items():
            assert found["equal"] and found["largest"] == 0, method
        if "loss" in cell:
            assert cell["loss_difference"] < 1e-4
    far = cells["a"]["positions-float32"]["against"]["the table in use"]
    assert far["patched, float64"]["1000000"] < 1e-6 < 1e-3 < far["patched, float32"]["1000000"]
    assert far["patched, float32"] == far["unpatched"]
    assert all(cell["ratio"] > 0 and cell["pairs"] == 2 for cell in cells["b"].values())

    steps = {name: cell for name, cell in cells["c"].items() if "memory" in cell}
    assert {"lora-8192", "lora-32768", "lora-131072"} <= steps.keys()
    for cell in steps.values():
        memory = cell["memory"]
        parts = {name: size for name, size in memory["parts_gib"].items() if name not in ("layer", "loss", "overhead")}
        turns = max(memory["parts_gib"].get(name, 0) for name in ("layer", "loss"))
        assert sum(parts.values()) + turns == pytest.approx(memory["predicted_gib"], abs=0.004)
        assert cell["mfu"] is None and cell["peak_tflops"] is None  # of a CPU no peak is known
        assert cell["tokens_per_second"] == pytest.approx(cell["tokens"] / cell["step_seconds"][0], rel=0.01)
    assert set(cells["c"]["loss-slices"]["seconds"]) == {"256", "512"}
    sizes = cells["c"]["prefill-blocks"]["sizes"]
    assert cells["c"]["prefill-blocks"]["fastest"]["seconds"] == min(row["seconds"] for row in sizes)
    assert cells["c"]["prefill-blocks"]["largest_loss_difference"] < 0.01

    for length in ("32768", "131072"):
        whole = cells["d"][f"perplexity-whole_logits-{length}"]["nll"]
        for side in ("one_pass", "chunked"):
            assert cells["d"][f"perplexity-{side}-{length}"]["nll"] == pytest.approx(whole, abs=0.01)  # bfloat16
        answers = cells["d"][f"retrieval-generate-{length}"]["answers"]
        assert len(answers) == 5 and cells["d"][f"retrieval-ours-{length}"]["answers"] == answers
    for cell in cells["e"].values():
        assert cell["largest_loss_difference"] < 1e-4 and cell["mean_loss"] > 0
    lora, plain = cells["f"]["lora-yarn-seed0"], cells["f"]["yarn"]
    assert lora["train"]["row_tokens"] == 1024 and lora["text"]["nll"].keys() == plain["text"]["nll"].keys()
    assert lora["text"]["nll"] != plain["text"]["nll"] and "fit" in cells["f"]["fitted"]
    arms = report["stages"]["g"]["summary"]["arms"]
    assert len(arms) == 6 and all(arm["seeds"] == 2 for arm in arms.values())
    losses = [cells["g"][f"{arm}-seed0"]["nll"] for arm in arms]
    assert len(set(losses)) == 6 and "interval_95" not in arms["rope"]


@pytest.mark.slow
def test_it_runs_without_what_is_optional(tmp_path: Path) -> None:
    """With torch, transformers, peft and accelerate alone training steps are taken, and what is skipped is said."""
    program = f"""
import runpy, sys
from importlib.machinery import PathFinder
class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        blocked = name.partition(".")[0] in {OPTIONAL}
        return None if blocked else PathFinder.find_spec(name, path, target)
sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]
import gpu
sys.argv = ["gpu.py", "--list", "--stages", "c,d,f"]
gpu.main()
sys.argv = ["gpu.py", "--tiny", "--stages", "c", "-o", {str(tmp_path / "gpu.json")!r}]
gpu.main()
"""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(FOLDER), str(FOLDER.parent)]),
    }
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("bitsandbytes", "liger-kernel", "lm-eval", "omegaconf", "datasets"):
        assert f"MISSING: {name} is not installed" in done.stdout
    assert "MISSING: no text is given: --text FILE" in done.stdout
    stage = json.loads((tmp_path / "gpu.json").read_text())["stages"]["c"]
    assert {"lora-8192", "lora-131072", "loss-slices", "prefill-blocks"} <= stage["cells"].keys()
    assert stage["skipped"]["qlora-8192"] == "bitsandbytes is not installed" and not stage["failed"]


# --- numbers, by hand


def test_shares_of_the_peak_by_hand(stages: Any) -> None:
    """Ten times the seconds of a plan that assumes 30 % of 989: 3 % of the same peak, 6 % of half of it."""
    training = stages("training")
    planned = plan("Llama-3.1-8B", length=8192)
    done = training.step_flops(planned)
    seconds = 10 * done.executed / (0.3 * 989e12)
    found = training.speeds(planned, seconds, 989.0)
    assert found["executed"] == pytest.approx(0.03, abs=1e-4)
    shape = shape_of("Llama-3.1-8B")
    rate = 8192 / seconds * (6 * shape.parameters + 12 * 32 * 4096 * 8192)
    assert found["palm_mfu"] == pytest.approx(rate / 989e12, abs=1e-4)
    assert found["mfu"] == pytest.approx(done.model / seconds / 989e12, abs=1e-4)
    assert found["tokens_per_second"] == pytest.approx(8192 / seconds, rel=1e-3)
    assert training.speeds(planned, seconds, 494.5)["executed"] == pytest.approx(0.06, abs=1e-4)
    assert training.speeds(planned, seconds, None)["palm_mfu"] is None


def test_a_plan_that_is_wrong_is_named(stages: Any) -> None:
    def step(ratio: float) -> dict[str, Any]:
        return {"memory": {"measured_over_predicted": ratio}, "tokens_per_second": 1.0, "mfu": None}

    done = {"lora-8192": step(1.09), "lora-32768": step(1.11), "qlora-8192": step(0.89), "loss-slices": {}}
    done["lora-131072"] = {"out_of_memory": "needs more"}
    summary = stages("training").summary(done)
    assert summary["plan is wrong by over 10 %"] == ["lora-32768", "qlora-8192"]


def test_intervals_from_scratch_are_students_over_seeds(stages: Any) -> None:
    size = {"parameters": 10, "steps": 2}
    losses = {"rope": [2.0, 2.2, 2.1], "nope": [2.5, 2.6, 2.9]}
    done: dict[str, Any] = {"size": {"chosen": size}}
    for arm, values in losses.items():
        for seed, nll in enumerate(values):
            done[f"{arm}-seed{seed}"] = {"arm": arm, "seed": seed, "nll": nll, "tokens": 7, **size}
    done["rope-seed9"] = {"arm": "rope", "seed": 9, "nll": 99.0, "tokens": 7, "parameters": 10, "steps": 3}
    rows = stages("from_scratch").summary(done)["arms"]
    differences = [a - b for a, b in zip(losses["nope"], losses["rope"], strict=True)]
    interval = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    assert rows["nope"]["nll_minus_rope"] == pytest.approx(sum(differences) / 3)
    assert rows["nope"]["interval_95"] == pytest.approx([interval.low, interval.high])
    assert rows["rope"]["seeds"] == 3 and rows["rope"]["perplexity"] == pytest.approx(math.exp(2.1))


def test_the_size_that_fits_is_chosen(stages: Any, tmp_path: Path) -> None:
    module, base = stages("from_scratch"), stages("base")
    text = rope_patch.data_path("assets") / "domains" / "english.txt"
    few, many = (base.Setting(True, "cpu", [text], tmp_path, tmp_path, stage_seconds=s) for s in (60.0001, 480.0))
    assert module.calibrate(few, {})["chosen"]["width"] == 32  # no time: the smallest
    assert module.calibrate(many, {})["chosen"]["width"] == 64


@pytest.mark.parametrize(
    ("device", "peak"),
    [("NVIDIA H200", 989.0), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA H100 80GB HBM3", 989.0), ("NVIDIA T4", None)],
)
def test_peaks_go_by_the_name_of_the_device(stages: Any, device: str, peak: float | None) -> None:
    assert stages("base").peak_tflops(device) == peak
