"""``rope-patch restore``."""

from __future__ import annotations

from collections.abc import Sequence

from rope_patch.cli.parsing import parse_words
from rope_patch.options.checkpoints import RestoreOptions


def restore(words: Sequence[str]) -> None:
    """Run ``rope-patch restore`` with the words that follow it."""
    options = parse_words(RestoreOptions, words)
    from rope_patch.checkpoints.folder_patch import restore_folder

    restore_folder(options.model, options.output, overwrite=options.force)
    print(f"wrote {options.output}: the checkpoint before its patch")
