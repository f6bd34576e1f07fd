"""What differs between lm-eval 0.4 and 0.5.0.dev1: the only module that asks which of them is installed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

from lm_eval.api.task import ConfigurableTask

SINCE_0_5 = not importlib.metadata.version("lm_eval").startswith("0.4.")
"""Whether lm-eval is 0.5 or one of its pre-releases."""


def task_request(task: Any, doc: Mapping[str, Any], context: str, **kwargs: Any) -> Any:
    """Return the request that lm-eval makes of a document, as the output type of the task asks."""
    if not SINCE_0_5:
        return ConfigurableTask.construct_requests(task, doc, context, **kwargs)
    # Each output type has a class of its own there, which makes a list, and the class of a YAML task has no requests.
    (request,) = ConfigurableTask._registry[task.OUTPUT_TYPE].construct_requests(task, doc, context, **kwargs)
    return request
