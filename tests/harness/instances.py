"""Requests and answers of lm-eval, of which 0.4 and 0.5 have different forms."""

from __future__ import annotations

from lm_eval.api.instance import Instance

from rope_patch.harness.lm_eval_versions import SINCE_0_5


def instance(kind, doc, arguments, index=0):
    if kind == "loglikelihood_rolling" and SINCE_0_5:
        arguments = ("", *arguments)
    return Instance(kind, doc, arguments, idx=index, task_name="task", doc_id=index, metadata=("task", index, 1))


def answers_of(sample):
    """The answers of a sample, one for each of its requests: 0.5 keeps a list of repeats for each."""
    return [each[0] if isinstance(each, list) else each for each in sample["filtered_resps"]]


def requests(kind, *arguments):
    return [instance(kind, {}, item, i) for i, item in enumerate(arguments)]
