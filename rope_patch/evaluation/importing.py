"""Import the modules in which users define methods, retrieval tasks or metrics of their own."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping, Sequence
from typing import Any

from rope_patch.evaluation.tasks import TASKS
from rope_patch.methods.importing import METHOD, Definable, import_methods


def import_modules(names: Sequence[str]) -> None:
    """Import modules that define methods, retrieval tasks or metrics, so that commands know them.

    Args:
        names: dotted names of modules, found as :func:`~rope_patch.methods.import_methods` finds them.

    Raises:
        ValueError: a module that is not found, fails at import, or defines none of the three. What it defined up to
            then is forgotten.
    """
    import_methods(names, (METHOD, TASK, METRIC))


def _metrics() -> MutableMapping[str, Any]:
    """Return the metrics; none before their module is imported, which needs transformers: nobody entered one yet."""
    module = sys.modules.get("rope_patch.evaluation.metrics")
    return {} if module is None else module.METRICS


TASK = Definable(
    "retrieval task", "class MyTask(rope_patch.evaluation.tasks.NeedleTask, name='my_task')", lambda: TASKS
)
METRIC = Definable(
    "metric", "METRICS['my_metric'] = MyMetric() with METRICS of rope_patch.evaluation.metrics", _metrics
)
