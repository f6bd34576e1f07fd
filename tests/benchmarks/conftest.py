"""What the tests of the suite for a GPU share."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the suite, by name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return lambda name: importlib.import_module(f"gpu_stages.{name}")
