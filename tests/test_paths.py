"""The shipped folders are found in a checkout and in a wheel, and their absence is said plainly."""

import runpy
import shutil
from pathlib import Path

import pytest

from rope_patch.runtime import packaged
from rope_patch.runtime.packaged import data_path

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", ["eval_tasks", "recipes"])
def test_checkout_folders_lie_beside_the_package(name: str) -> None:
    assert data_path(name) == ROOT / name
    assert (data_path(name) / "README.md").is_file()


def test_a_neighbour_in_site_packages_is_not_ours(tmp_path: Path) -> None:
    """tests/test_packaging.py finds the folders within an installed package."""
    (tmp_path / "rope_patch" / "runtime").mkdir(parents=True)
    (tmp_path / "recipes").mkdir()
    copied = shutil.copyfile(packaged.__file__, tmp_path / "rope_patch" / "runtime" / "packaged.py")
    data_path = runpy.run_path(str(copied))["data_path"]
    with pytest.raises(FileNotFoundError, match=r"recipes.*Reinstall"):
        data_path("recipes")
    (tmp_path / "pyproject.toml").touch()
    assert data_path("recipes") == tmp_path / "recipes"
