"""The shipped folders are found in a checkout and in a wheel, and their absence is said plainly."""

import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rope_patch.runtime.packaged import data_path

ROOT = Path(__file__).resolve().parents[1]


def installed(package: Path) -> Callable[[str], Path]:
    """``data_path`` of a copy of the package that lies elsewhere."""
    shutil.copyfile(ROOT / "rope_patch" / "packaged.py", package / "packaged.py")
    names: Any = runpy.run_path(str(package / "packaged.py"))
    return names["data_path"]


@pytest.mark.parametrize("name", ["eval_tasks", "recipes"])
def test_checkout_folders_lie_beside_the_package(name: str) -> None:
    assert data_path(name) == ROOT / name
    assert (data_path(name) / "README.md").is_file()


def test_assets_lie_inside_the_package() -> None:
    assert data_path("assets") == ROOT / "rope_patch" / "assets"


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
    with pytest.raises(FileNotFoundError, match=r"holds no 'recipes' folder.*Reinstall the wheel"):
        data_path("recipes")
    (tmp_path / "pyproject.toml").touch()
    assert data_path("recipes") == tmp_path / "recipes"


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"unknown data folder 'tasks'\. Known: assets, eval_tasks, recipes"):
        data_path("tasks")
