"""``rope-patch recipes``."""

from __future__ import annotations

import shutil

from rope_patch import data_path
from rope_patch.options.shipped import RecipesOptions
from rope_patch.runtime.folders import folder_in_one_move


def recipes(options: RecipesOptions) -> None:
    """Run ``rope-patch recipes`` with its options."""
    skipped = shutil.ignore_patterns("__pycache__")
    with folder_in_one_move(options.folder, overwrite=options.force) as copied:
        shutil.copytree(data_path("recipes"), copied, dirs_exist_ok=True, ignore=skipped)
    print(f"copied to {options.folder}: {', '.join(sorted(path.name for path in options.folder.iterdir()))}")
