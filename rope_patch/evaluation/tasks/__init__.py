"""Retrieval tasks, one file each. To add one, write its file and name it here."""

from rope_patch.evaluation.tasks import multiquery, multivalue, niah, passkey, variable_tracking
from rope_patch.evaluation.tasks.base import MODES, NEEDLES, TASKS, Draw, NeedleTask, Question, Task, find_task

__all__ = ["MODES", "NEEDLES", "TASKS", "Draw", "NeedleTask", "Question", "Task", "find_task"]
__all__ += ["multiquery", "multivalue", "niah", "passkey", "variable_tracking"]
