"""``rope-patch recipes``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from rope_patch.cli.options import Force

recipes = typer.Typer(help="Training scripts that ship with the package.", no_args_is_help=True)


@recipes.command()
def copy(
    folder: Annotated[Path, typer.Argument(help="Folder to copy the recipes into.", show_default=False)],
    force: Force = False,
) -> None:
    """Copy the recipes into a folder of yours, to run and change."""
    from rope_patch import data_path
    from rope_patch.files import folder_in_one_move

    with folder_in_one_move(folder, overwrite=force) as made:
        shutil.copytree(data_path("recipes"), made, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    print(f"copied to {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
