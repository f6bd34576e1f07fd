"""``rope-patch recipes``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from rope_patch.cli.options import Force

recipes = typer.Typer(help="Copy the training scripts and their configs, to change them.", no_args_is_help=True)


@recipes.command()
def copy(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The folder to copy the recipes into.", show_default=False)
    ],
    force: Force = False,
) -> None:
    """Copy the training scripts and their YAML configs into a folder of yours, where you can change them."""
    from rope_patch import data_path
    from rope_patch.runtime.folders import folder_in_one_move

    with folder_in_one_move(folder, overwrite=force) as copied:
        shutil.copytree(data_path("recipes"), copied, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    print(f"copied to {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
