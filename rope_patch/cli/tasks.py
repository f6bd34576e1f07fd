"""``rope-patch tasks``."""

from __future__ import annotations


def tasks() -> None:
    """Print the folder of the long-context tasks for lm-evaluation-harness.

    Example: **lm_eval --include_path "$(rope-patch tasks)" --tasks passkey_4k …**
    """
    from rope_patch import data_path

    print(data_path("eval_tasks"))
