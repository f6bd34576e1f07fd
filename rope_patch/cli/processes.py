"""Runs one command in several processes together, under ``torchrun`` or ``accelerate launch``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path


@contextlib.contextmanager
def working_together(output: Path, files: Sequence[str]) -> Iterator[bool]:
    """Join the processes of a command within a ``with`` block; only the first one prints and writes.

    Args:
        output: the folder that the first process locks and creates.
        files: the names of the files that it will write there.

    Yields:
        Whether this process is the first or the only one.
    """
    from rope_patch.runtime.folders import folder_to_write
    from rope_patch.runtime.parallel import joined_processes

    with contextlib.ExitStack() as stack:
        rank = stack.enter_context(joined_processes())
        if rank:
            silent = stack.enter_context(Path(os.devnull).open("w"))
            stack.enter_context(contextlib.redirect_stdout(silent))
            stack.enter_context(contextlib.redirect_stderr(silent))
        else:
            stack.enter_context(folder_to_write(output, files))
        yield rank == 0
