"""``--import`` takes modules that define retrieval tasks or metrics, beside those that define methods."""

from __future__ import annotations

import json
import re
import sys

import pytest
from support.commands import run

import rope_patch
from rope_patch import METHODS
from rope_patch.evaluation.importing import import_modules
from rope_patch.evaluation.metrics import METRICS
from rope_patch.evaluation.tasks import TASKS

TASK = '''
from rope_patch.evaluation.tasks import NeedleTask

class HouseNumber(NeedleTask, name="own_house"):
    """A number of three digits for each name."""

    source = "a test"
    needle = " {name} lives at number {value}."
    question = " At which number does {name} live? {name} lives at number"
    digits = 3
'''
METRIC = '''
from rope_patch.evaluation.metrics import METRICS, Metric, Span

class AnswerLogProbability(Metric):
    """Log-probability of the right answer."""

    name, unit, lower_is_better = "own_logprob", "nats", False

    def spans(self, spec):
        return [Span(self.name, length, task=task) for task in spec.tasks for length in spec.lengths]

    def at(self, spec, length):
        return [span for span in self.spans(spec) if span.stop == length]

    def values(self, result, span):
        return [sample.logprob for sample in result.retrieval[span.task].samples(span.stop)]

METRICS["own_logprob"] = AnswerLogProbability()
'''
MEASURE = ("--methods", "default", "--lengths", "64", "--samples", "1", "--depths", "0.5", "--windows", "1")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory to work in; what the modules of a test define goes again."""
    registries = [(registry, dict(registry)) for registry in (METHODS, TASKS, METRICS)]
    modules, path = set(sys.modules), list(sys.path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for registry, before in registries:
        registry.clear()
        registry.update(before)
    for name in set(sys.modules) - modules:
        if name.startswith("own_"):
            del sys.modules[name]
    sys.path[:] = path


def compared(folder, *words):
    run("compare", rope_patch.data_path("assets") / "llama", *MEASURE, "--no-report", "-o", folder / "out", *words)
    return json.loads((folder / "out" / "comparison.json").read_text())


def test_a_command_measures_a_task_of_a_users_module(folder):
    (folder / "own_tasks.py").write_text(TASK)
    made = compared(folder, "--tasks", "own_house", "--import", "own_tasks")
    (cell,) = made["rows"][0]["retrieval"]["own_house"]["cells"]
    assert re.fullmatch(r"\d{3}", cell["samples"][0]["expected"])


def test_a_command_shows_a_metric_of_a_users_module(folder):
    (folder / "own_metrics.py").write_text(METRIC)
    made = compared(folder, "--import", "own_metrics")
    (sample,) = made["rows"][0]["retrieval"]["passkey"]["cells"][0]["samples"]
    (column,) = (column for column in made["columns"] if column["metric"] == "own_logprob")
    assert column["values"] == [sample["logprob"]]


@pytest.mark.parametrize("code", [TASK, METRIC], ids=["task", "metric"])
def test_a_module_may_be_imported_twice(folder, code):
    (folder / "own_module.py").write_text(code)
    import_modules(["own_module"])
    import_modules(["own_module"])


def test_a_module_that_defines_nothing_is_refused_with_what_is_looked_for(folder):
    (folder / "own_empty.py").write_text(
        "from rope_patch.evaluation.metrics import METRICS\nfrom rope_patch import Yarn"
    )
    with pytest.raises(ValueError, match="own_empty"):
        import_modules(["own_empty"])


REPLACING = METRIC.replace('METRICS["own_logprob"]', 'METRICS["perplexity"]')


@pytest.mark.parametrize(
    ("code", "registry"),
    [(TASK, TASKS), (METRIC, METRICS), (REPLACING, METRICS)],
    ids=["task", "metric", "metric replaced"],
)
def test_what_a_module_defined_before_it_failed_is_forgotten(folder, code, registry):
    before = dict(registry)
    (folder / "own_broken.py").write_text(f"{code}\n1 / 0")
    with pytest.raises(ValueError, match="ZeroDivisionError"):
        import_modules(["own_broken"])
    assert registry == before
