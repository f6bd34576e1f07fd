"""Runs ``recipes/finetune_lora.py``, the script that trains, with its options."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rope_patch.options.finetune import RecipeOptions
from rope_patch.planning import Plan
from rope_patch.runtime.packaged import data_path


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        folder: the folder of the adapter (or model), which :func:`rope_patch.load` loads.
        results: the contents of ``results.json``: options, command, scores before and after training. It is empty in
            all processes but the first, and after a dry run.
        finished_before: whether an earlier command finished this run, so that nothing was trained now.
        plan: the memory of a training step; only a dry run predicts it, and not for every kind of model.
    """

    folder: Path
    results: dict[str, Any]
    finished_before: bool = False
    plan: Plan | None = None


def finetune(options: RecipeOptions, train: Callable[..., Result] | None = None, **how: Any) -> Result:
    """Train as the options say, and leave an adapter that cannot be loaded onto the wrong rotary table unnoticed.

    Args:
        options: the options of the run.
        train: the function of a recipe that trains; by default that of ``recipes/finetune_lora.py``.
        **how: the other arguments of that function.

    Raises:
        ValueError: the options do not fit the model or the data, or the output folder holds another run.
        PatchError: the patch does not fit the model.
        BlockingIOError: another command works in the output folder.
        torch.OutOfMemoryError: a step does not fit into memory.
    """
    if train is None:
        train = runpy.run_path(str(data_path("recipes") / "finetune_lora.py"))["train"]
    try:
        return train(options, **how)
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(
            f"a step does not fit: --dry-run predicts its memory and says what to change. {error}"
        ) from error
