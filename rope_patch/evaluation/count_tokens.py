"""Counts the tokens that an :class:`EvalSpec` reads, which states a number of windows: that of its suite."""

from __future__ import annotations

from rope_patch.evaluation.tasks import TASKS
from rope_patch.options.evaluation import EvalSpec


def check_tasks(spec: EvalSpec) -> EvalSpec:
    """Return the spec if all its tasks are known.

    Raises:
        ValueError: a task is unknown; the message names the known ones.
    """
    for task in spec.tasks:
        TASKS.find(task)
    return spec


def tokens_to_read(spec: EvalSpec) -> int:
    """Return how many tokens one run reads; the progress bar counts to this number."""
    # A joined task asks for all its needles in one prompt; any other task has a prompt for each depth.
    prompts = sum(1 if TASKS.find(task).joined else len(spec.depths) for task in spec.tasks)
    return (spec.windows or 0) * spec.longest + prompts * spec.samples * sum(spec.lengths)
