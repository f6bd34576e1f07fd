"""``rope-patch tasks``."""

from __future__ import annotations

from collections.abc import Sequence

from rope_patch.cli.parsing import parse_words
from rope_patch.options.shipped import TasksOptions


def tasks(words: Sequence[str]) -> None:
    """Run ``rope-patch tasks`` with the words that follow it."""
    options = parse_words(TasksOptions, words)
    from rope_patch import data_path

    path = data_path("eval_tasks")
    if not options.folder:
        for file in sorted(path.glob("*.yaml")):
            # The first line of each task's YAML is a comment that says what it asks.
            first_line = file.read_text(encoding="utf-8").partition("\n")[0]
            print(f"{file.stem:24}{first_line.removeprefix('# ')}")
        print("\nlm-eval has these names, rope-patch compare those in its --help. For --include_path of lm_eval:")
    print(path)
