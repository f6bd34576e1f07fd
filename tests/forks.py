"""Run a call in a forked process, which has all modules already, and stop it at a chosen moment."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from tqdm import tqdm

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.copyfile")
"""Audit events of Python that change files; ``open`` for writing is one more."""


def forked(call, stop: int | None = None, within: Path | None = None, at=None, kind=signal.SIGKILL) -> int:
    """Run a call in a forked process, killed at its n-th change below a folder, or at an audit event of a kind.

    Returns its exit status; that of a signal is negative.
    """
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        count = 0

        def audit(event, args):
            nonlocal count
            if at is not None:
                return os.kill(os.getpid(), kind) if at(event, args) else None
            if event == "open":
                if not isinstance(args[1], str) and not (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                    return
                if isinstance(args[1], str) and not set(args[1]) & set("wax+"):
                    return
            elif event not in CHANGES:
                return
            if str(within) in os.path.abspath(str(args[0])):
                count += 1
                if count == stop:
                    os.kill(os.getpid(), kind)

        if stop is not None or at is not None:
            sys.addaudithook(audit)
        # tqdm's own lock is shared between processes: a child killed while it holds it would stop the tests for ever.
        tqdm.set_lock(threading.RLock())
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        call()
        os._exit(0)
    except SystemExit as stopped:
        os._exit(int(stopped.code or 0))
    except BaseException:
        os._exit(77)
