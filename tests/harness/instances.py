"""Requests of lm-eval."""

from lm_eval.api.instance import Instance


def instance(kind, doc, arguments, index=0):
    return Instance(kind, doc, arguments, idx=index, task_name="task", doc_id=index, metadata=("task", index, 1))


def requests(kind, *arguments):
    return [instance(kind, {}, item, i) for i, item in enumerate(arguments)]
