"""The scripts of the benchmarks as modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture
def stages() -> Any:
    """The modules of the suite for a GPU, by name."""
    return lambda name: importlib.import_module(f"gpu_stages.{name}")
