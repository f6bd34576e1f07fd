"""Retrieval tasks. To add one, write a file with its class in this folder: all files here are imported."""

import importlib
import pkgutil

from rope_patch.evaluation.tasks.base import TASKS, Draw, NeedleTask, Question, Task, members

__all__ = ["TASKS", "Draw", "NeedleTask", "Question", "Task", "members"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
