"""Runs the cells of stages within a budget; each is written when it is finished, and is not measured again."""

from __future__ import annotations

import functools
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gpu_stages.base import Cell, Setting, Stage
from gpu_stages.manifest import lacking
from measuring import command, environment, write

WHAT = "what a CPU cannot measure: correctness, speed, memory and training of patched models on a GPU"
_POISONED = ("CUDA error", "device-side assert", "illegal memory access")
"""Parts of error messages after which this process cannot use the GPU any more."""


class Suite:
    """The report of a run, and the functions that add to it.

    Args:
        setting: the setting of all stages.
        output: the JSON file of the report; results in it are kept, and new ones are added.
        budget: the time that the whole run may take [s].
        again: whether finished cells are measured again.
        clock: a function that returns the time [s].

    Raises:
        ValueError: the file was measured on another device, or in a rehearsal.
    """

    def __init__(
        self,
        setting: Setting,
        output: Path,
        budget: float,
        *,
        again: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.setting, self.output, self.again, self.clock = setting, output, again, clock
        self.ends = clock() + budget
        about = {"tiny": setting.tiny, "device": setting.device_name}
        self.report: dict[str, Any] = {"benchmark": "gpu", "what": WHAT, **about, "runs": [], "stages": {}}
        if output.is_file():
            self.report = json.loads(output.read_text(encoding="utf-8"))
            for name, value in about.items():
                if self.report.get(name) != value:
                    raise ValueError(
                        f"{output} was measured with {name} {self.report.get(name)!r}, this run has {value!r}: give "
                        "another file with -o"
                    )
        self.begun = False
        self.failed: list[str] = []

    def part(self, stage: Stage) -> dict[str, Any]:
        """Return the part of the report that belongs to a stage."""
        fresh: dict[str, Any] = {"title": stage.title, "what": stage.what, "cells": {}, "skipped": {}, "failed": {}}
        part: dict[str, Any] = self.report["stages"].setdefault(stage.key, fresh)
        return part

    def finished(self, stage: Stage, cell: Cell) -> bool:
        """Return whether a cell has a result, measured with the same settings."""
        result = self.report["stages"].get(stage.key, {}).get("cells", {}).get(cell.name)
        # Through JSON, as the settings of the report are: tuples become lists.
        return result is not None and result["settings"] == json.loads(json.dumps(dict(cell.settings)))

    def run(self, stages: Sequence[Stage]) -> list[str]:
        """Measure the cells that have no result, stage after stage; return the names of those without time left."""
        left = []
        for stage in stages:
            left += self._stage(stage)
            self.setting.drop()
        return left

    def _stage(self, stage: Stage) -> list[str]:
        print(f"{stage.key}. {stage.title}", flush=True)
        part, left = self.part(stage), []
        todo = [cell for cell in stage.cells(self.setting) if self.again or not self.finished(stage, cell)]
        for cell in todo:
            if reasons := lacking((*stage.needs, *cell.needs), self.setting):
                part["skipped"][cell.name] = "; ".join(reasons)
                print(f"   {cell.name}: skipped, {part['skipped'][cell.name]}", flush=True)
                self._write(stage)
                continue
            if self.clock() + cell.seconds > self.ends:
                left.append(f"{stage.key}/{cell.name}")
                continue
            self._measure(stage, cell)
        if left:
            print(f"   {len(left)} cells are left: run the same command again", flush=True)
        part["left"] = [name.partition("/")[2] for name in left]
        self._write(stage)
        return left

    def _measure(self, stage: Stage, cell: Cell) -> None:
        """Measure one cell and write its result, or why it has none.

        Raises:
            SystemExit: an error leaves the GPU unusable for this process.
        """
        part = self.part(stage)
        began = self.clock()
        try:
            result = cell.measure(part["cells"])
        except torch.OutOfMemoryError as error:
            # This is a result. The model that is held may be the cause, so it is dropped.
            result = {"out_of_memory": str(error).splitlines()[0]}
            self.setting.drop()
        except Exception as error:
            part["failed"][cell.name] = f"{type(error).__name__}: {error}"
            self.failed.append(f"{stage.key}/{cell.name}")
            traceback.print_exc()
            print(f"   {cell.name}: failed, {part['failed'][cell.name]}", flush=True)
            self._write(stage)
            if any(sign in str(error) for sign in _POISONED):
                sys.exit("error: the GPU cannot be used by this process any more: run the same command again")
            self.setting.drop()
            return
        seconds = round(self.clock() - began, 2)
        part["cells"][cell.name] = {"run": self._run(), "seconds": seconds, "settings": dict(cell.settings), **result}
        part["skipped"].pop(cell.name, None)
        part["failed"].pop(cell.name, None)
        print(f"   {cell.name}: {seconds:.1f} s", flush=True)
        self._write(stage)

    def _run(self) -> int:
        """Return the index of this run among those of the report; it is added with its first result."""
        if not self.begun:
            self.report["runs"].append(
                {"command": command(), "environment": self.environment, "precision": precision()}
            )
            self.begun = True
        return len(self.report["runs"]) - 1

    @functools.cached_property
    def environment(self) -> dict[str, Any]:
        """The versions and the hardware that the figures depend on."""
        device = self.setting.device
        found = environment("peft", "accelerate", device=device, threads=torch.get_num_threads())
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version() if device == "cuda" else None}
        if device == "cuda":
            properties = torch.cuda.get_device_properties(0)
            found["gpu_memory_bytes"] = properties.total_memory
            found["compute_capability"] = f"{properties.major}.{properties.minor}"
        return found

    def _write(self, stage: Stage) -> None:
        part = self.part(stage)
        if stage.summary is not None and part["cells"]:
            part["summary"] = stage.summary(part["cells"])
        write(self.report, self.output)


def precision() -> dict[str, Any]:
    """Return the settings of torch that change what matrix products compute."""
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }
