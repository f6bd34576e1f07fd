"""Run real engines on cases, each in its own environment, and put results into one report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = Path(os.environ.get("ENGINES", ROOT / ".venv" / "engines"))
REPORT = Path(os.environ.get("ENGINES_REPORT", ROOT / "build" / "engines.json"))
SUPPORT = Path(__file__).parent


@dataclass(frozen=True, eq=False)
class Case:
    """A checkpoint that an engine reads.

    Attributes:
        name: the name of the case.
        path: the folder or GGUF file.
        ids: the token ids of a prompt.
        expected: the case whose log-probabilities transformers computes, if that is another one.
        options: options of the engine.
    """

    name: str
    path: Path
    ids: list[int]
    expected: str = ""
    options: dict[str, Any] = field(default_factory=dict)


def python_of(engine: str) -> Path:
    """Return the Python of an engine's environment; a test is skipped where there is none."""
    if engine in ("transformers", "transformers-5"):
        return Path(sys.executable)
    python = ENVIRONMENTS / engine / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no environment {python}: make test-engines builds it")
    return python


def answers(engine: str, folder: Path, cases: list[Case], script: str = "engine_worker.py") -> dict[str, Any]:
    """Run an engine on cases; beside its answers, ``NAME.npy`` in the folder hold log-probabilities."""
    python = python_of(engine)
    jobs = [{"name": c.name, "path": str(c.path), "ids": c.ids, "options": c.options} for c in cases]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [python, "-W", "ignore", SUPPORT / script, engine, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads((folder / "answers.json").read_text()))


def of_tokens(logprobs: np.ndarray, ids: list[int]) -> np.ndarray:
    """Return the log-probabilities of the tokens of a prompt from the second on; an engine may have read fewer."""
    count = min(len(logprobs), len(ids) - 1)
    return logprobs[np.arange(count), ids[1 : count + 1]]


def difference(one: np.ndarray, other: np.ndarray, ids: list[int]) -> float:
    """Return the largest difference of a log-probability of a token."""
    ours = of_tokens(one, ids)
    theirs = of_tokens(other, ids)
    count = min(len(ours), len(theirs))
    return float(np.abs(ours[:count] - theirs[:count]).max())


def report(section: str, results: Any) -> None:
    """Put results into the report, in the place of older ones of the same section."""
    sections = json.loads(REPORT.read_text()) if REPORT.exists() else {}
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps(sections | {section: results}, indent=1) + "\n")
