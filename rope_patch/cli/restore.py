"""``rope-patch restore``."""

from __future__ import annotations

from collections.abc import Sequence

from rope_patch.cli.loading import bytes_copied
from rope_patch.cli.parsing import parse
from rope_patch.options.checkpoints import RestoreOptions


def restore(words: Sequence[str]) -> None:
    """Run ``rope-patch restore`` with the words behind it."""
    options = parse(RestoreOptions, words)
    from rope_patch.checkpoints.gguf_patch import restore_gguf
    from rope_patch.checkpoints.offline import restore_folder
    from rope_patch.runtime.folders import is_gguf

    if is_gguf(options.model):
        with bytes_copied(options.output) as on_bytes:
            restore_gguf(options.model, options.output, overwrite=options.force, on_bytes=on_bytes)
    else:
        restore_folder(options.model, options.output, overwrite=options.force)
    print(f"wrote {options.output}: the checkpoint before its patch")
