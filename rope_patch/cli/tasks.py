"""``rope-patch tasks``."""

from __future__ import annotations

from typing import Annotated

import typer


def tasks(
    folder: Annotated[
        bool, typer.Option("--folder", help="Print only the folder, for **lm_eval --include_path**.")
    ] = False,
) -> None:
    """List the long-context tasks for lm-evaluation-harness, and the folder that holds them.

    Example: **lm_eval --include_path "$(rope-patch tasks --folder)" --tasks rope_passkey …**
    """
    from rope_patch import data_path

    path = data_path("eval_tasks")
    if not folder:
        for file in sorted(path.glob("*.yaml")):
            first_line = file.read_text(encoding="utf-8").partition("\n")[0]
            print(f"{file.stem:24}{first_line.removeprefix('# ')}")
        print()
    print(path)
