"""``rope-patch restore``."""

from __future__ import annotations

from rope_patch.cli.loading import bytes_copied, say_copied
from rope_patch.cli.options import Checkpoint, Force, Import, NewCheckpoint


def restore(model: Checkpoint, output: NewCheckpoint, force: Force = False, imports: Import = None) -> None:
    """Write a copy of a patched checkpoint with the rotary tables that it had before the patch.

    If MODEL is a GGUF file, the output is one too.

    Example: **rope-patch restore ./llama-abf -o ./llama**
    """
    from rope_patch.checkpoints.gguf_patch import restore_gguf
    from rope_patch.checkpoints.offline import restore_folder
    from rope_patch.files import is_gguf

    if is_gguf(model):
        with bytes_copied(output) as on_bytes:
            restore_gguf(model, output, overwrite=force, on_bytes=on_bytes)
    else:
        restore_folder(model, output, overwrite=force, progress=say_copied)
    print(f"wrote {output}: the checkpoint before its patch")
