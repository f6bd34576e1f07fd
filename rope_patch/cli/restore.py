"""``rope-patch restore``."""

from __future__ import annotations

from rope_patch.cli.options import Checkpoint, Force, Import, NewFolder, say_copied


def restore(model: Checkpoint, output: NewFolder, force: Force = False, imports: Import = None) -> None:
    """Write a copy of a patched checkpoint with the rotary tables that it had before the patch.

    Example: **rope-patch restore ./llama-abf -o ./llama**
    """
    from rope_patch.checkpoints.offline import restore_folder

    restore_folder(model, output, overwrite=force, progress=say_copied)
    print(f"wrote {output}: the checkpoint before its patch")
