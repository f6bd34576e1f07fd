"""Counts the tokens that an :class:`EvalSpec` reads, which states a number of windows: that of its suite."""

from __future__ import annotations

from dataclasses import replace

from rope_patch.evaluation.tasks import TASKS, members
from rope_patch.options.evaluation import EvalSpec


def check_tasks(spec: EvalSpec) -> EvalSpec:
    """Return the spec with the tasks of a suite in the place of its name.

    Raises:
        ValueError: a task is unknown; the message names the known ones.
    """
    tasks = list[str]()
    for name in spec.tasks:
        if not members(name):
            TASKS.find(name, sorted({task.suite for task in TASKS.values()} - {""}))
        tasks += members(name) or [name]
    return replace(spec, tasks=tuple(dict.fromkeys(tasks)))


def tokens_to_read(spec: EvalSpec) -> int:
    """Return how many tokens one run reads; the progress bar counts to this number."""
    # A joined task asks for all its needles in one prompt; any other task has a prompt for each depth.
    prompts = sum(1 if TASKS.find(task).joined else len(spec.depths) for task in spec.tasks)
    return (spec.windows or 0) * spec.longest + prompts * spec.samples * sum(spec.lengths)
