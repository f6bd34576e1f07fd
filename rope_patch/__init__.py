"""Adapt Hugging Face checkpoints to longer contexts by changing their rotary position embeddings.

>>> import rope_patch
>>> str(rope_patch.PRope(p=0.5))
'p_rope:p=0.5'
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

# The public names are said once, in the file that type checkers read.
_MODULE_OF = {
    public.name: statement.module
    for statement in ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8")).body
    if isinstance(statement, ast.ImportFrom)
    for public in statement.names
}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Import a public name on first use: ``import rope_patch`` itself does no work."""
    if name in _MODULE_OF:
        found = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = found  # the next use finds it there
        return found
    raise AttributeError(f"module 'rope_patch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
