"""A table that is fitted to text, as a candidate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from rope_patch.fitting import Objective, Schedule, fit, held_out_spec
from rope_patch.fitting.estimate import cost_of_fit
from rope_patch.modeling.budget import Pace

OBJECTIVE = Objective(positions="pose")


def fitted(model: nn.Module, tokenizer: Any, length: int, resume: Path, on_progress: Callable[[str, int], None]) -> str:
    """Fit a table to text at skipped positions, and return it as a method string; the model is left as it was."""
    patch = fit(model, tokenizer, target_length=length, objective=OBJECTIVE, resume=resume, on_progress=on_progress)
    patch.restore()
    return str(patch.method)


def cost(model: nn.Module, length: int, pace: Pace) -> tuple[int, float]:
    """Return the tokens that :func:`fitted` reads, and how long that takes [s]."""
    spec = held_out_spec(model, length)
    return cost_of_fit(pace, spec, OBJECTIVE, Schedule(), trained_length=spec.lengths[0])
