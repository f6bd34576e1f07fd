"""``rope-patch restore``."""

from __future__ import annotations

from rope_patch.checkpoints.folder_patch import restore_folder
from rope_patch.options.checkpoints import RestoreOptions


def restore(options: RestoreOptions) -> None:
    """Run ``rope-patch restore`` with its options."""
    restore_folder(options.model, options.output, overwrite=options.force)
    print(f"wrote {options.output}: the checkpoint before its patch")
