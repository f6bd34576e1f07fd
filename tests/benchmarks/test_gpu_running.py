"""What stops, resumes and skips a run of the suite for a GPU, and what is brought along for it."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="not in the source distribution")


# --- what stops, resumes and skips, with cells that measure nothing


class Clock:
    """A clock that cells set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def says(value: Any) -> Any:
    """What a cell measures that always finds the same."""
    return lambda done: {"value": value}


def raises(error: BaseException) -> Any:
    def measure(done: Any) -> dict[str, Any]:
        raise error

    return measure


@pytest.fixture
def suite(stages: Any, tmp_path: Path) -> Any:
    """Runs a stage of cells, each a name with what it measures; returns the suite, the cells left, and the report."""
    base, running = stages("base"), stages("running")

    def run(
        cells: dict[str, Any], changes: dict[str, Any] | None = None, *, budget: float = 1000.0, **options: Any
    ) -> tuple[Any, list[str], dict[str, Any]]:
        listed = [base.Cell(name, 60.0, measure, **(changes or {}).get(name, {})) for name, measure in cells.items()]
        stage = base.Stage("x", "a stage", "what", lambda _: listed, summary=lambda done: {"finished": len(done)})
        limit = options.pop("stage_seconds", 480.0)
        setting = base.Setting(options.pop("tiny", True), "cpu", [], tmp_path, tmp_path, stage_seconds=limit)
        made = running.Suite(setting, tmp_path / "gpu.json", budget, **({"clock": Clock()} | options))
        left = made.run([stage])
        return made, left, json.loads((tmp_path / "gpu.json").read_text())

    return run


def test_a_finished_cell_is_not_measured_again(suite: Any) -> None:
    suite({"one": says(1)})
    _, _, report = suite({"one": says(2), "two": says(3)})
    cells = report["stages"]["x"]["cells"]
    assert (cells["one"]["value"], cells["two"]["value"]) == (1, 3)
    assert (cells["one"]["run"], cells["two"]["run"]) == (0, 1) and len(report["runs"]) == 2
    assert report["stages"]["x"]["summary"] == {"finished": 2}
    _, _, report = suite({"one": says(2)}, again=True)
    assert report["stages"]["x"]["cells"]["one"]["value"] == 2


def test_a_cell_of_other_settings_is_measured_again(suite: Any) -> None:
    suite({"one": says(1)}, {"one": {"settings": {"text": "a"}}})
    _, _, report = suite({"one": says(2)}, {"one": {"settings": {"text": "a"}}})
    assert report["stages"]["x"]["cells"]["one"]["value"] == 1
    _, _, report = suite({"one": says(2)}, {"one": {"settings": {"text": "b"}}})
    assert report["stages"]["x"]["cells"]["one"]["value"] == 2


def test_an_interrupted_run_keeps_what_is_finished(suite: Any, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        suite({"one": says(1), "two": raises(KeyboardInterrupt()), "three": says(3)})
    kept = json.loads((tmp_path / "gpu.json").read_text())["stages"]["x"]["cells"]
    assert {name: cell["value"] for name, cell in kept.items()} == {"one": 1}
    _, _, report = suite({"one": says(0), "two": says(2), "three": says(3)})
    assert [cell["value"] for cell in report["stages"]["x"]["cells"].values()] == [1, 2, 3]


def test_what_is_missing_is_said_and_skipped(suite: Any, stages: Any, capsys: pytest.CaptureFixture[str]) -> None:
    made, _, report = suite({"one": says(1), "two": says(2)}, {"one": {"needs": ("text", "GPU")}})
    reason = "no text is given: --text FILE; it runs on a GPU only"
    assert report["stages"]["x"]["skipped"] == {"one": reason} and not made.failed
    assert f"   one: skipped, {reason}\n" in capsys.readouterr().out
    assert list(report["stages"]["x"]["cells"]) == ["two"]
    _, _, report = suite({"one": says(1)})  # now it is there
    assert not report["stages"]["x"]["skipped"] and report["stages"]["x"]["cells"]["one"]["value"] == 1


def test_every_need_of_a_cell_is_in_the_manifest(stages: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = importlib.import_module("gpu")
    setting = stages("base").Setting(False, "cpu", [], tmp_path, tmp_path)
    known = stages("manifest").NEEDS
    asked = {name for stage in gpu.STAGES for cell in stage.cells(setting) for name in (*stage.needs, *cell.needs)}
    assert asked == known.keys() - {"gguf"}  # which the weights ask for themselves
    for stage in gpu.STAGES:
        names = [cell.name for cell in stage.cells(setting)]
        assert len(names) == len(set(names)) and max(cell.seconds for cell in stage.cells(setting)) < 480 / 2


def test_the_minutes_that_are_stated_are_those_of_the_cells(stages: Any, tmp_path: Path) -> None:
    setting = stages("base").Setting(False, "cpu", [], tmp_path, tmp_path)
    gpu = importlib.import_module("gpu")
    page = (FOLDER.parent / "docs" / "gpu.md").read_text(encoding="utf-8")
    for stage in gpu.STAGES:
        minutes = sum(cell.seconds for cell in stage.cells(setting)) / 60
        (stated,) = re.findall(rf"\b{stage.key} ([0-9.]+)[,.]", gpu.__doc__)
        (shown,) = re.findall(rf"^\| {stage.key}\. [^|]+\| ([0-9.]+) \|", page, re.MULTILINE)
        assert float(stated.rstrip(".")) == float(shown) == pytest.approx(minutes, abs=0.5)


def test_the_budget_stops_a_run_before_a_cell_that_would_exceed_it(suite: Any) -> None:
    clock = Clock()

    def takes(seconds: float) -> Any:
        def measure(done: Any) -> dict[str, Any]:
            clock.now += seconds
            return {}

        return measure

    cells = {"one": takes(60), "two": takes(60), "three": takes(60)}
    _, left, report = suite(cells, budget=150.0, clock=clock)
    assert left == ["x/three"] and report["stages"]["x"]["left"] == ["three"]
    _, left, report = suite(cells, budget=60.0, clock=clock)  # the same command goes on
    assert not left and not report["stages"]["x"]["left"] and len(report["stages"]["x"]["cells"]) == 3


def test_a_slow_machine_gets_fewer_cells(suite: Any) -> None:
    clock = Clock()

    def slow(done: Any) -> dict[str, Any]:
        clock.now += 180.0  # three times its estimate
        return {}

    _, left, _ = suite({"one": slow, "two": slow, "three": slow}, clock=clock, stage_seconds=450.0)
    assert left == ["x/three"]  # 360 s are over, and the next one is expected to take 180, not 60


def test_running_out_of_memory_is_a_result_and_an_error_is_not(suite: Any) -> None:
    cells = {"large": raises(torch.OutOfMemoryError("needs 200 GiB\nmore")), "wrong": raises(ValueError("no such"))}
    made, _, report = suite({**cells, "last": says(1)})
    stage = report["stages"]["x"]
    assert stage["cells"]["large"]["out_of_memory"] == "needs 200 GiB" and "value" in stage["cells"]["last"]
    assert stage["failed"] == {"wrong": "ValueError: no such"} and made.failed == ["x/wrong"]
    made, _, report = suite({**cells, "wrong": says(2)})
    assert not report["stages"]["x"]["failed"] and not made.failed


def test_an_unusable_gpu_ends_the_run(suite: Any) -> None:
    with pytest.raises(SystemExit, match="run the same command again"):
        suite({"one": raises(RuntimeError("CUDA error: an illegal memory access")), "two": says(2)})


def test_results_of_another_device_are_refused(suite: Any, tmp_path: Path) -> None:
    suite({"one": says(1)})
    with pytest.raises(ValueError, match="was measured with tiny True, this run has False: give another file with -o"):
        suite({"one": says(1)}, tiny=False)


# --- what is brought along


def test_parts_of_a_file_are_put_together(stages: Any, tmp_path: Path) -> None:
    manifest = stages("manifest")
    source = tmp_path / "source" / "weights.gguf"
    source.parent.mkdir()
    source.write_bytes(bytes(range(250)))
    carried = tmp_path / "carried"
    carried.mkdir()
    written = manifest.split(source, carried, size=100)
    assert [path.name for path in written] == [f"weights.gguf.{i}-of-3" for i in (1, 2, 3)]
    assert max(path.stat().st_size for path in written) == 100
    digest = manifest.sha256(source)
    with pytest.raises(ValueError, match="are of another file"):
        manifest.join(carried, "weights.gguf", "0" * 64)
    assert manifest.join(carried, "weights.gguf", digest).read_bytes() == source.read_bytes()
    (carried / "weights.gguf").unlink()
    written[1].unlink()
    with pytest.raises(ValueError, match=r"holds parts \[1, 3\] of weights.gguf: bring all of them"):
        manifest.join(carried, "weights.gguf", digest)


def test_a_missing_part_is_said(stages: Any, tmp_path: Path) -> None:
    manifest = stages("manifest")
    setting = stages("base").Setting(False, "cpu", [], tmp_path, tmp_path)
    (none,) = manifest.lacking(["smollm2"], setting)
    assert "holds no SmolLM2-135M-Instruct.Q4_1.gguf" in none
    (tmp_path / f"{manifest.SMOLLM2.gguf}.2-of-2").write_bytes(b"")
    (one,) = manifest.lacking(["smollm2"], setting)
    assert "holds 1 of 2 parts of" in one


def test_wheels_are_those_beside_what_every_stage_has(stages: Any) -> None:
    names = [name.partition("==")[0] for name in stages("manifest").wheels(["omegaconf", "datasets"])]
    assert {"omegaconf", "datasets", "dill"} <= set(names)
    assert not {"torch", "transformers", "peft", "accelerate", "numpy", "tqdm"} & set(names)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--stages", "a,z"], "unknown stage 'z'. Known: a, b, c, d, e, f, g"),
        (["--budget", "25"], "a time is a number with s, m or h, such as 25m, got '25'"),
        (["--text", "no.txt"], "no file no.txt"),
        (["--device", "cpu"], "--tiny rehearses the stages on a CPU"),
    ],
)
def test_wrong_options_say_what_to_do(
    stages: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: list[str], message: str
) -> None:
    stages("base")
    monkeypatch.setattr(sys, "argv", ["gpu.py", *option])
    with pytest.raises(SystemExit):
        importlib.import_module("gpu").main()
    assert message in capsys.readouterr().err


def test_times_are_read_as_people_write_them(stages: Any) -> None:
    stages("base")
    seconds = importlib.import_module("gpu").seconds
    assert [seconds(text) for text in ("25m", "90s", "1.5h")] == [1500.0, 90.0, 5400.0]
