"""A table that is fitted to text, as a candidate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from rope_patch.fitting import Objective, Schedule, fit, held_out_spec
from rope_patch.fitting.estimate import FitCost

OBJECTIVE = Objective(positions="pose")


def fitted(
    model: nn.Module, tokenizer: Any, length: int, resume: Path, on_progress: Callable[[str, int], None]
) -> tuple[str, bool]:
    """Fit a table to text at skipped positions; the model is left as it was.

    Returns:
        The table as a method string, and whether it is better than its start; else it is the start.
    """
    patch = fit(model, tokenizer, target_length=length, objective=OBJECTIVE, resume=resume, on_progress=on_progress)
    patch.restore()
    return str(patch.method), not patch.chosen.endswith(", start")


def cost(model: nn.Module, length: int) -> FitCost:
    """Return what :func:`fitted` reads."""
    spec = held_out_spec(model, length)
    return FitCost(spec, OBJECTIVE, Schedule(), spec.lengths[0])
