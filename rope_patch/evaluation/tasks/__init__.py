"""Retrieval tasks, one file each. To add one, write its file and name it here."""

from rope_patch.evaluation.tasks import (
    cwe,
    fwe,
    json_kv,
    multiquery,
    multivalue,
    niah,
    niah_multikey_2,
    niah_multikey_3,
    passage_retrieval,
    passkey,
    qa1,
    qa2,
    qa3,
    variable_tracking,
)
from rope_patch.evaluation.tasks.base import NEEDLES, TASKS, Draw, NeedleTask, Question, Task

__all__ = ["NEEDLES", "TASKS", "Draw", "NeedleTask", "Question", "Task"]
__all__ += ["cwe", "fwe", "json_kv", "multiquery", "multivalue", "niah", "niah_multikey_2", "niah_multikey_3"]
__all__ += ["passage_retrieval", "passkey", "qa1", "qa2", "qa3", "variable_tracking"]
