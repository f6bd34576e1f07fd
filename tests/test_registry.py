"""What users add by name, in a module of their own or in an installed package: methods, retrieval tasks, metrics."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from support.commands import MEASURE, run
from support.fresh import run_code
from support.pages import contributed
from support.tiny import LLAMA

from rope_patch import parse
from rope_patch.evaluation.metrics import METRICS
from rope_patch.evaluation.tasks import TASKS
from rope_patch.kv_cache.formats import FORMATS
from rope_patch.methods import METHODS
from rope_patch.registry import import_modules

ROOT = Path(__file__).resolve().parents[1]

METHOD = """
from dataclasses import dataclass
from rope_patch.methods import Method

@dataclass(frozen=True)
class Halved(Method, name="{name}"):
    \"\"\"Every frequency halved.\"\"\"
    by: float = 2.0
    def inv_freq(self, table):
        return table.inv_freq / self.by
"""
TASK = contributed("house_number")
METRIC = contributed("answer_logprob")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory to work in; what the modules of a test define goes again."""
    before = [(registry, dict(registry)) for registry in (METHODS, METRICS, TASKS, FORMATS)]
    modules = set(sys.modules)
    path = list(sys.path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for registry, entries in before:
        registry.clear()
        registry.update(entries)
    for name in set(sys.modules) - modules:
        if name.startswith("own_"):
            del sys.modules[name]
    sys.path[:] = path


# --- modules of a user's own ----------------------------------------------------------------------------------------


def test_a_module_below_the_current_directory_is_imported_by_its_dotted_name(folder):
    (folder / "own_package").mkdir()
    (folder / "own_package" / "methods.py").write_text(METHOD.format(name="own_inner"))
    for _ in range(2):  # the second time it is imported already
        import_modules(["own_package.methods"])
    assert str(parse("own_inner")) == "own_inner:by=2"
    assert sys.path[-1] == str(folder), "it does not come before installed packages afterwards"


def test_a_command_measures_a_task_and_shows_a_metric_of_a_users_modules(folder):
    (folder / "own_tasks.py").write_text(TASK)
    (folder / "own_metrics.py").write_text(METRIC)
    asked = ("--methods", "default", "--tasks", "house_number", *MEASURE, "--report")
    printed = run("compare", LLAMA, *asked, "--import", "own_tasks", "--import", "own_metrics", "-o", folder / "out")
    assert "answer_logprob house_number 64" in printed
    assert "answer_logprob house_number 64" in (folder / "out" / "report.html").read_text()
    made = json.loads((folder / "out" / "comparison.json").read_text())
    (sample,) = made["rows"][0]["retrieval"]["house_number"]["cells"][0]["samples"]
    assert re.fullmatch(r"\d{3}", sample["expected"])
    (column,) = (column for column in made["columns"] if column["metric"] == "answer_logprob")
    assert column["values"] == [sample["logprob"]]


@pytest.mark.parametrize(
    ("name", "code", "word"),
    [
        ("own_absent", None, "dotted name"),
        ("./own_methods", "", "dotted name"),
        ("own_clash", METHOD.format(name="pi"), "taken"),
        ("own_method", METHOD.format(name="own_method").replace("def inv_freq", "def other"), "define inv_freq"),
        ("own_metric", METRIC.replace("def values", "def other"), "must define values"),
        (
            "own_format",
            "from rope_patch.kv_cache.formats import Format\nclass F(Format, name='own_format'): pass",
            "bits",
        ),
        ("own_exit", METHOD.format(name="own_exit") + "\nraise SystemExit", "SystemExit"),
        ("own_late", METHOD.format(name="own_late") + "\n1 / 0", "ZeroDivisionError"),
    ],
)
def test_what_cannot_be_imported_says_why(folder, name, code, word):
    if code is not None:
        (folder / f"{name.removeprefix('./')}.py").write_text(code)
    for _ in range(2):  # a failed module is not taken for an imported one
        with pytest.raises(ValueError, match=word):
            import_modules([name])


# --- installed packages ---------------------------------------------------------------------------------------------


def package(site: Path, name: str, code: str, entry: str) -> None:
    """Install a package of one module by hand, as pip lays it out."""
    (site / name).mkdir(parents=True)
    (site / name / "__init__.py").write_text(code)
    info = site / f"{name}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(entry)


def python(code, *paths, **options):
    path = os.pathsep.join(map(str, (*paths, ROOT)))
    return run_code(code, env={**os.environ, "PYTHONPATH": path}, **options)


def test_an_installed_package_offers_a_method_and_is_imported_when_it_is_needed(tmp_path):
    package(tmp_path, "halved", METHOD.format(name="halved"), "[rope_patch.methods]\nhalved = halved:Halved\n")
    done = python(
        "import sys\n"
        "from rope_patch.methods import METHODS, parse\n"
        "parse('pi:factor=2')\n"
        "assert 'halved' not in sys.modules\n"
        "assert str(parse('halved:by=4+p_rope')) == 'halved:by=4+p_rope:p=0.75'\n"
        "assert list(METHODS)[-1] == 'halved'\n"
        "sys.argv[1:] = ['methods']\n"
        "from rope_patch.cli.app import main\n"
        "main()\n",
        tmp_path,
    )
    assert "Every frequency halved." in done.stdout, done.stderr


def test_an_installed_package_offers_a_task_and_a_metric(tmp_path):
    package(tmp_path, "house", TASK, "[rope_patch.tasks]\nhouse_number = house\n")
    package(tmp_path, "logprob", METRIC, "[rope_patch.metrics]\nanswer_logprob = logprob\n")
    done = python(
        "from rope_patch.evaluation.tasks import TASKS\n"
        "from rope_patch.evaluation.metrics import METRICS\n"
        "print(TASKS.find('house_number').digits, METRICS.find('answer_logprob').unit)",
        tmp_path,
    )
    assert done.stdout.split() == ["3", "nats"], done.stderr


BROKEN = {
    "fails": ("import nothing_of_this_name", "ModuleNotFoundError"),
    "clashes": (METHOD.format(name="yarn"), "taken"),
    "leaves": ("import sys; sys.exit()", "SystemExit"),
}


def test_a_package_that_cannot_be_loaded_is_named_and_leaves_the_other_methods(tmp_path):
    for name, (code, _) in BROKEN.items():
        package(tmp_path, name, code, f"[rope_patch.methods]\n{name} = {name}\n")
    done = python(
        "from rope_patch import METHODS, Yarn, parse\n"
        f"broken = {list(BROKEN)}\n"
        "assert METHODS.keys().isdisjoint(broken) and METHODS['yarn'] is Yarn\n"
        "parse('yarn:factor=2')\n"
        "for name in broken:\n"
        "    try:\n"
        "        parse(name)\n"
        "    except ValueError as error:\n"
        "        print(error)\n",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    for name, (_, reason) in BROKEN.items():
        (line,) = (line for line in done.stdout.splitlines() if f"'{name}'" in line)
        assert reason in line and f"{name} 1.5" in line
        assert done.stderr.count(f"'{name}' cannot be loaded") == 1
