"""The shipped folders are found in a checkout and in a wheel, and their absence is said plainly."""

import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rope_patch.runtime import packaged
from rope_patch.runtime.packaged import data_path

ROOT = Path(__file__).resolve().parents[1]


def installed(package: Path) -> Callable[[str], Path]:
    """``data_path`` of a copy of the package that lies elsewhere."""
    (package / "runtime").mkdir()
    copied = shutil.copyfile(packaged.__file__, package / "runtime" / "packaged.py")
    names: Any = runpy.run_path(str(copied))
    return names["data_path"]


@pytest.mark.parametrize("name", ["eval_tasks", "recipes"])
def test_checkout_folders_lie_beside_the_package(name: str) -> None:
    assert data_path(name) == ROOT / name
    assert (data_path(name) / "README.md").is_file()


def test_installed_folders_lie_inside_the_package(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "rope_patch"
    for folder in ("_data/eval_tasks", "_data/recipes", "assets"):
        (package / folder).mkdir(parents=True)
    data_path = installed(package)
    assert data_path("eval_tasks") == package / "_data" / "eval_tasks"
    assert data_path("recipes") == package / "_data" / "recipes"
    assert data_path("assets") == package / "assets"


def test_a_neighbour_in_site_packages_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "rope_patch").mkdir()
    (tmp_path / "recipes").mkdir()
    data_path = installed(tmp_path / "rope_patch")
    with pytest.raises(FileNotFoundError, match=r"recipes.*Reinstall"):
        data_path("recipes")
    (tmp_path / "pyproject.toml").touch()
    assert data_path("recipes") == tmp_path / "recipes"
