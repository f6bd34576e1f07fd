"""lm-eval's index of tasks, which is built once in each process, since it has 14,000 tasks of its own."""

from __future__ import annotations

import functools
from pathlib import Path

import lm_eval.tasks
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import TaskIndex

import rope_patch

TASKS = rope_patch.data_path("eval_tasks")

build = TaskIndex.build


def our_tasks(**metadata):
    """lm-eval's manager of our tasks alone, for the bundled Llama at 512 tokens unless the metadata say otherwise."""
    llama = str(rope_patch.data_path("assets") / "llama")
    metadata = {"pretrained": llama, "max_seq_lengths": 512, **metadata}
    return TaskManager(include_defaults=False, include_path=str(TASKS), metadata=metadata)


@functools.cache
def defaults():
    return build([Path(lm_eval.tasks.__file__).parent])


def read_once(paths, **options):
    standard, *others = paths if (root := Path(lm_eval.tasks.__file__).parent) in paths else [root, *paths]
    found = dict(defaults()) if standard in paths else {}
    return found | build(others, **options)
