"""lm-eval's index of tasks: of its own 14,000 those of RULER alone, since reading all takes seven seconds."""

import functools
from pathlib import Path

import lm_eval.tasks
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import TaskIndex

import rope_patch
from support.tiny import LLAMA

TASKS = rope_patch.data_path("eval_tasks")

build = TaskIndex.build


def our_tasks(**metadata):
    """lm-eval's manager of our tasks alone, for the bundled Llama at 512 tokens unless the metadata say otherwise."""
    llama = str(LLAMA)
    metadata = {"pretrained": llama, "max_seq_lengths": 512, **metadata}
    return TaskManager(include_defaults=False, include_path=str(TASKS), metadata=metadata)


@functools.cache
def of_ruler():
    return build([Path(lm_eval.tasks.__file__).parent / "ruler"])


def read_once(paths, **options):
    standard, *others = paths if (root := Path(lm_eval.tasks.__file__).parent) in paths else [root, *paths]
    found = dict(of_ruler()) if standard in paths else {}
    return found | build(others, **options)
