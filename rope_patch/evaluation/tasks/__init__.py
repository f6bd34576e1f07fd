"""Retrieval tasks, one file each or one of a kind. To add one, write its file: all files here are imported."""

import importlib
import pkgutil

from rope_patch.evaluation.tasks.base import TASKS, Draw, NeedleTask, Question, Task

__all__ = ["TASKS", "Draw", "NeedleTask", "Question", "Task"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
