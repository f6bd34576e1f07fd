"""``rope-patch tasks``."""

from __future__ import annotations


def tasks() -> None:
    """Print the folder of lm-eval tasks, for **lm_eval --include_path "$(rope-patch tasks)"**."""
    from rope_patch import data_path

    print(data_path("eval_tasks"))
