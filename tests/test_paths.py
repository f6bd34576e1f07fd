"""The shipped folders are found in a checkout and in a wheel, and their absence is said plainly."""

import runpy
import shutil

import pytest

from rope_patch.runtime import packaged


def test_a_neighbour_in_site_packages_is_not_ours(tmp_path):
    """tests/test_packaging.py finds the folders within an installed package."""
    (tmp_path / "rope_patch" / "runtime").mkdir(parents=True)
    (tmp_path / "recipes").mkdir()
    copied = shutil.copyfile(packaged.__file__, tmp_path / "rope_patch" / "runtime" / "packaged.py")
    data_path = runpy.run_path(str(copied))["data_path"]
    with pytest.raises(FileNotFoundError, match=r"recipes.*Reinstall"):
        data_path("recipes")
    (tmp_path / "pyproject.toml").touch()
    assert data_path("recipes") == tmp_path / "recipes"
