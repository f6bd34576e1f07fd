"""``rope-patch tasks``."""

from __future__ import annotations

from rope_patch import data_path
from rope_patch.options.shipped import TasksOptions


def tasks(options: TasksOptions) -> None:
    """Run ``rope-patch tasks`` with its options."""
    path = data_path("eval_tasks")
    if not options.folder:
        for file in sorted(path.glob("*.yaml")):
            # The first line of each task's YAML is a comment that says what it asks.
            first_line = file.read_text(encoding="utf-8").partition("\n")[0]
            print(f"{file.stem:24}{first_line.removeprefix('# ')}")
        print(
            "\nThese are the names in lm-eval; rope-patch compare --help has its own. The folder for lm_eval "
            "--include_path:"
        )
    print(path)
