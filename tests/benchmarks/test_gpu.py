"""The suite for a GPU, rehearsed on a CPU: every stage end to end, what stops and resumes it, and numbers by hand."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from support.forks import run_script

from rope_patch.planning import plan
from rope_patch.planning.shapes import shape_of

pytest.importorskip("gpu_stages", reason="not in the source distribution")
base, running, training = (importlib.import_module(f"gpu_stages.{name}") for name in ("base", "running", "training"))
FOLDER = Path(__file__).parents[2] / "benchmarks"


# --- all of it


@pytest.mark.full
def test_a_rehearsal_runs_every_stage_once(tmp_path):
    output = tmp_path / "gpu.json"
    command = [str(FOLDER / "gpu.py"), "--tiny", "-o", str(output)]
    run_script(command, tmp_path / "log.txt")
    report = json.loads(output.read_text())
    assert list(report["stages"]) == list("abcde") and report["tiny"] is True and len(report["runs"]) == 1
    for key, stage in report["stages"].items():
        assert not stage["failed"] and not stage["left"] and stage["cells"], key
        assert not stage["cells"].keys() & stage["skipped"].keys()
        assert all("GPU" in reason or "not installed" in reason for reason in stage["skipped"].values())
    check_numbers({key: stage["cells"] for key, stage in report["stages"].items()})

    printed = run_script(command, tmp_path / "log.txt")
    assert json.loads(output.read_text()) == report, "nothing is measured twice"
    assert " s\n" not in printed and "skipped" in printed


def check_numbers(cells):
    """What must hold of the numbers whatever the machine is."""
    for cell in cells["a"].values():
        for method, found in cell.get("hidden_states", {}).items():
            assert found["equal"] and found["largest"] == 0, method
        assert cell.get("loss_difference", 0) < 1e-4
    far = cells["a"]["positions-float32"]["against"]["the table in use"]
    assert far["patched, float32"]["1000000"] > 1e-3
    assert far["patched, float32"] == far["unpatched"]
    assert all(cell["mfu"] is None for cell in cells["c"].values())  # of a CPU no peak is known
    for length in ("32768", "131072"):
        losses = [side["answer"] for side in cells["d"][f"perplexity-{length}"]["sides"].values()]
        assert losses == pytest.approx([losses[0]] * 4, abs=0.01)  # bfloat16
        ours, theirs = (side["answer"] for side in cells["d"][f"retrieval-{length}"]["sides"].values())
        assert ours == theirs and len(ours) == 5
    decoded = [cell for name, cell in cells["e"].items() if not name.startswith("blocks")]
    assert all(cell["largest_loss_difference"] < 1e-4 and cell["mean_loss"] > 0 for cell in decoded)


# --- what stops a run, with cells that measure nothing


def test_an_interrupted_run_keeps_what_is_finished(tmp_path):
    def interrupted(done):
        raise KeyboardInterrupt

    def run(**cells):
        listed = [base.Cell(name, 60.0, measure) for name, measure in cells.items()]
        stage = base.Stage("x", "a stage", "what", lambda _: listed)
        running.Suite(base.Setting(tiny=True, device="cpu", text=()), tmp_path / "gpu.json", 1000.0).run([stage])

    with pytest.raises(KeyboardInterrupt):
        run(one=lambda done: {"value": 1}, two=interrupted)
    run(one=lambda done: {"value": 0}, two=lambda done: {"value": 2})
    cells = json.loads((tmp_path / "gpu.json").read_text())["stages"]["x"]["cells"]
    assert {name: cell["value"] for name, cell in cells.items()} == {"one": 1, "two": 2}


# --- the stages


def test_shares_of_the_peak_by_hand():
    """Ten times the seconds of a plan that assumes 30 % of 989: 3 % of the same peak, 6 % of half of it."""
    planned = plan("Llama-3.1-8B", length=8192)
    done = training.step_flops(planned)
    seconds = 10 * done.executed / (0.3 * 989e12)
    found = training.speeds(planned, seconds, 989.0)
    assert found["executed"] == pytest.approx(0.03, abs=1e-4)
    rate = 8192 / seconds * (6 * shape_of("Llama-3.1-8B").parameters + 12 * 32 * 4096 * 8192)
    assert found["palm_mfu"] == pytest.approx(rate / 989e12, abs=1e-4)
    assert found["mfu"] == pytest.approx(done.model / seconds / 989e12, abs=1e-4)
    assert training.speeds(planned, seconds, 494.5)["executed"] == pytest.approx(0.06, abs=1e-4)
    assert training.speeds(planned, seconds, None)["palm_mfu"] is None
