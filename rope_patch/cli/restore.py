"""``rope-patch restore``."""

from __future__ import annotations

from rope_patch.cli.options import Force, Model, Out, say_copied


def restore(folder: Model, out: Out, force: Force = False) -> None:
    """Write a copy of a patched checkpoint as it was before the patch."""
    from rope_patch.checkpoints.offline import restore_folder

    restore_folder(folder, out, overwrite=force, progress=say_copied)
    print(f"wrote {out}: the checkpoint before its patch")
