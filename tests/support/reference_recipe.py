"""The script that pretrains the reference checkpoints, imported as a module, since it is not in the package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SCRIPT = Path(__file__).parents[2] / "recipes" / "pretrain_reference.py"


def load_recipe() -> ModuleType:
    """Import the script of the recipe as a module, and return it."""
    spec = importlib.util.spec_from_file_location("pretrain_reference", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


recipe = load_recipe()
