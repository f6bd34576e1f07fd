"""The exit status of a command: errors of the user's making are one line on stderr."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from rope_patch.runtime.text import printable

SIGHUP = 1
"""What a terminal sends that is closed; Windows has no such signal."""
SPINS = "10000"
"""How often a thread of a command looks whether the others are ready before it sleeps. At GNU OpenMP's default of
300,000, commands beside each other use up the cores by waiting: see ``benchmarks/results/busy_cpu.json``."""

EXTRAS = {
    "matplotlib": "plots",
    "peft": "train",
    "trl": "train",
    "datasets": "train",
    "bitsandbytes": "train",
    "lm_eval": "eval",
    "gguf": "gguf",
}
"""The extra of this package that brings each module which a part of the commands needs."""


def guarded(run: Callable[[], int | None], interrupted: str = "no file was left half written") -> int:
    """Run a command, and return its exit status.

    Args:
        run: the command; it returns its status, or None for success.
        interrupted: the message after Ctrl-C, which says what became of the work that was done.

    Returns:
        The status of the command; 2 where the user's words or files are wrong, 1 where a library fails, 130 after
        Ctrl-C and 143 after SIGTERM. With ``ROPE_PATCH_DEBUG`` set, errors are raised.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # it has to stand before torch is imported
    try:
        return run() or 0
    except KeyboardInterrupt as error:
        print(f"interrupted: {interrupted}", file=sys.stderr)
        return 128 + int((error.args or (signal.SIGINT,))[0])
    except BrokenPipeError:
        # The reader of the output is gone, as with `| head`: no message would be seen either.
        return 1
    except Exception as error:
        if os.environ.get("ROPE_PATCH_DEBUG"):
            raise
        print(f"error: {printable(_message(error))}", file=sys.stderr)
        return 2 if _is_users(error) else 1


def run_and_exit(run: Callable[[], int | None]) -> NoReturn:
    """Run a command as :func:`guarded` does, and end the process with its status.

    Other signals that end it interrupt it as Ctrl-C does, so that files that are half written are deleted. Then nothing
    is waited for: a signal may come while a library takes a lock, for which that library's threads would wait for ever
    at the end of the process, as those of tensorboardX do. A program that calls this gets its own signals back.
    """
    with contextlib.ExitStack() as stack:
        for number in {signal.SIGTERM, SIGHUP} & signal.valid_signals():
            if signal.getsignal(number) is signal.SIG_DFL:  # nohup has SIGHUP ignored
                stack.callback(signal.signal, number, signal.SIG_DFL)
                signal.signal(number, _interrupt)
        status = guarded(run)
        if status > 128:
            sys.stdout.flush()
            os._exit(status)
    sys.exit(status)


def _interrupt(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # a launcher may send it again, which would interrupt the deleting
    raise KeyboardInterrupt(number)


def _is_users(error: Exception) -> bool:
    # The types that this package raises for wrong input, and Python for files and packages that are missing.
    return isinstance(error, ValueError | TypeError | OSError | ImportError)


def _message(error: Exception) -> str:
    """Return one line that says what is wrong, and where a library fails how to see more."""
    if not _is_users(error):
        message = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        return f"{message} (ROPE_PATCH_DEBUG=1 shows where)"
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        # Python's own text begins with an error number.
        advice = ": make room there, and run the same command again" if error.errno == errno.ENOSPC else ""
        return f"{str(error.filename)!r}: {error.strerror.lower()}{advice}"
    if isinstance(error, ModuleNotFoundError):
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra == "plots":
            return f'{error}: pip install "rope_patch[plots]", or give --no-report'
        if extra is not None:
            return f'{error}: pip install "rope_patch[{extra}]"'
    return str(error)
