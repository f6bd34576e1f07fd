"""Run a call in forked processes, which have all modules already: in one that is killed, or in a group of several."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState
from tqdm import tqdm

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.copyfile")
"""Audit events of Python that change files; ``open`` for writing is one more."""


def forked(call, stop: int | None = None, within: Path | None = None, at=None, kind=signal.SIGKILL) -> int:
    """Run a call in a forked process, and return its exit status; that of a signal is negative.

    Args:
        call: the function that is run.
        stop: number of the change below ``within`` at which the process is killed; None for never.
        within: the folder whose changes are counted.
        at: function of an audit event and its arguments that tells whether to kill the process there.
        kind: the signal that kills it.
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


def together(call: Callable[[int], None], folder: Path) -> list[str]:
    """Run a call in a group of forked processes with torchrun's variables, and return the output of each.

    Forked processes have all modules already, which new interpreters would import for seconds each.

    Args:
        call: function that is run with the rank of the process.
        folder: the folder into which the processes write their output.
        count: number of processes.
        ends: the exit statuses that they must have, by default 0; that of a signal is negative.
    """
    # The system chooses a free port, which is then free again for the group.
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    pages = [folder / f"rank-{rank}.txt" for rank in range(2)]
    processes = []
    for rank, page in enumerate(pages):
        pid = os.fork()
        if pid:
            processes.append(pid)
            continue
        try:
            signal.alarm(300)  # a process that waits for one that has failed is killed
            sys.stdout = sys.stderr = page.open("w", buffering=1)
            warnings.simplefilter("default")  # pytest would raise them; here they belong to the output
            warnings.showwarning = lambda message, *_: print(message, file=sys.stderr)
            tqdm.set_lock(threading.RLock())
            for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
                del os.environ[name]
            group = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
            group |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
            os.environ |= {name: str(value) for name, value in group.items()}
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
            call(rank)
            os._exit(0)
        except SystemExit as stopped:
            os._exit(int(stopped.code or 0))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in processes]
    texts = [page.read_text() for page in pages]
    assert ended == [0, 0], "\n".join(text[-3000:] for text in texts)
    return texts
