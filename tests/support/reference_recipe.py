"""The script that pretrains the reference checkpoints, as a module: it lies outside the package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SCRIPT = Path(__file__).parents[2] / "recipes" / "pretrain_reference.py"


def load_recipe() -> ModuleType:
    """The recipe as a module: it is a script outside the package."""
    spec = importlib.util.spec_from_file_location("pretrain_reference", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


recipe = load_recipe()
