"""Methods of users' own: in a package that offers them, in a module that is imported by name."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support.fresh import run_code

from rope_patch import METHODS, parse
from rope_patch.methods import import_methods

ROOT = Path(__file__).resolve().parents[2]

HALVED = """
from dataclasses import dataclass
from rope_patch.methods import Method

@dataclass(frozen=True)
class Halved(Method, name="{name}"):
    \"\"\"Every frequency halved.\"\"\"
    by: float = 2.0
    def inv_freq(self, table):
        return table.inv_freq / self.by
"""


def package(site: Path, name: str, code: str, entry: str) -> None:
    """Install a package of one module by hand, as pip lays it out."""
    (site / name).mkdir(parents=True)
    (site / name / "__init__.py").write_text(code)
    info = site / f"{name}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(f"[rope_patch.methods]\n{entry}\n")


def python(code, *paths):
    path = os.pathsep.join(map(str, (*paths, ROOT)))
    return run_code(code, env={**os.environ, "PYTHONPATH": path})


def test_an_installed_package_offers_a_method_and_is_imported_when_it_is_needed(tmp_path):
    package(tmp_path, "halved", HALVED.format(name="halved"), "halved = halved:Halved")
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


BROKEN = {
    "fails": ("import nothing_of_this_name", "ModuleNotFoundError"),
    "clashes": (HALVED.format(name="yarn"), "taken"),
    "empty": ("", "no method"),
    "halfway": (HALVED.format(name="halfway") + "1 / 0\n", "ZeroDivisionError"),
}


def test_a_package_that_cannot_be_loaded_is_named_and_leaves_the_other_methods(tmp_path):
    for name, (code, _) in BROKEN.items():
        package(tmp_path, name, code, f"{name} = {name}")
    done = python(
        "from rope_patch.methods import METHODS, Yarn, parse\n"
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
        assert done.stderr.count(f"'{name}' is missing") == 1


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A directory to work in; methods and modules that a test defines go again."""
    methods, modules, path = dict(METHODS), set(sys.modules), list(sys.path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    METHODS.clear()
    METHODS.update(methods)
    for name in set(sys.modules) - modules:
        if name.startswith("own_"):
            del sys.modules[name]
    sys.path[:] = path


def test_a_module_below_the_current_directory_is_imported_by_its_dotted_name(directory):
    (directory / "own_package").mkdir()
    (directory / "own_package" / "methods.py").write_text(HALVED.format(name="own_inner"))
    for _ in range(2):  # the second time it is imported already
        import_methods(["own_package.methods"])
    assert str(parse("own_inner")) == "own_inner:by=2"


def test_the_current_directory_does_not_come_before_installed_packages_afterwards(directory):
    (directory / "own_methods.py").write_text(HALVED.format(name="own_halved"))
    import_methods(["own_methods"])
    assert sys.path.index(str(directory)) == len(sys.path) - 1


@pytest.mark.parametrize(
    ("name", "code", "word"),
    [
        ("own_absent", None, "found no module"),
        ("own_methods.py", "", "dotted"),
        ("./own_methods", "", "dotted"),
        ("own_broken", "def", "SyntaxError"),
        ("own_empty", "from rope_patch import Yarn", "defines no method"),
        ("own_clash", HALVED.format(name="pi"), "taken"),
        ("own_late", HALVED.format(name="own_late") + "\n1 / 0", "ZeroDivisionError"),
    ],
)
def test_what_cannot_be_imported_says_why_and_changes_no_method(directory, name, code, word):
    before = dict(METHODS)
    if code is not None:
        (directory / f"{name.removesuffix('.py').removeprefix('./')}.py").write_text(code)
    with pytest.raises(ValueError, match=word):
        import_methods([name])
    assert dict(METHODS) == before


def test_a_class_of_the_same_name_does_not_take_the_place_of_one_that_ships(directory):
    (directory / "own_yarn.py").write_text(HALVED.format(name="yarn").replace("Halved", "Yarn"))
    with pytest.raises(ValueError, match="rope_patch"):
        import_methods(["own_yarn"])
