"""Processes that share work hear of each other, so that none waits for one that is no more."""

from __future__ import annotations

import atexit
import collections
import contextlib
import json
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rope_patch import processes

BEAT = 2.0
"""Time between two signs of life of a process [s]."""
SILENCE = 40.0
"""How long a process may give no sign of life before the others stop [s]."""
HEARD = 3
"""Beats within which the other processes hear of a failure, unless they are busy loading a model."""
POLL = 0.02
"""Time between two looks for something that is waited for [s]."""

_ALIVE, _FAILED, _LEFT = "rope_patch/alive", "rope_patch/failed", "left"
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What ``torchrun`` and ``accelerate launch`` tell each process."""


class Peers:
    """The processes of a group, which talk through its store; this one gives signs of life as long as it runs.

    Args:
        store: of the process group.
        rank: number of this process.
        size: how many there are.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self._lost = ""
        self._leaving = threading.Event()
        self.store.set(f"{_ALIVE}/{rank}", "0")
        self._thread = threading.Thread(target=self._live, name="rope_patch peers", daemon=True)
        self._thread.start()
        atexit.register(self.leave)

    def check(self) -> None:
        """Raise where another process failed or gives no sign of life.

        Raises:
            ConnectionError: which one, and how to go on.
        """
        if self._lost:
            raise ConnectionError(self._lost)

    def get(self, name: str) -> bytes | None:
        """Return what a process stored under a name; None where it is not there yet.

        Raises:
            ConnectionError: the first process, which holds the store, is no more.
        """
        with self._connection():
            return bytes(self.store.get(name)) if self.store.check([name]) else None

    def put(self, name: str, value: str) -> None:
        """Store a value under a name, for all processes.

        Raises:
            ConnectionError: as :meth:`get`.
        """
        with self._connection():
            self.store.set(name, value)

    def delete(self, name: str) -> None:
        """Forget what is stored under a name."""
        with self._connection():
            self.store.delete_key(name)

    def count(self, name: str, step: int = 1) -> int:
        """Add to a counter that all processes share, and return its value.

        Raises:
            ConnectionError: as :meth:`get`.
        """
        with self._connection():
            return int(self.store.add(name, step))

    def wait(self, name: str, what: str) -> bytes:
        """Return what the first process stores under a name, once it does.

        Args:
            name: under which it is stored.
            what: it is, for the messages.

        Raises:
            ConnectionError: a process failed, or gives no sign of life.
            RuntimeError: the first process never comes.
        """
        began, warned = time.monotonic(), False
        first, last = (patience.total_seconds() for patience in processes.PATIENCE)
        while (value := self.get(name)) is None:
            self.check()
            waited = time.monotonic() - began
            if waited > first and not warned:
                warnings.warn(f"still waiting for the first process: {what}", stacklevel=3)
                warned = True
            if waited > last:
                raise RuntimeError(
                    f"the first process does not come to {what}: every process has to make the same calls, or none "
                    "but the first; rope_patch.processes.alone() lets each evaluate by itself"
                )
            time.sleep(POLL)
        return value

    def fail(self, error: BaseException) -> None:
        """Tell the other processes that this one stops with an error."""
        with contextlib.suppress(RuntimeError, OSError):
            if not self.store.check([_FAILED]):
                self.store.set(_FAILED, f"{self.rank} {type(error).__name__}: {error}")

    def leave(self) -> None:
        """Give no more signs of life, and say so: the others do not miss this process."""
        atexit.unregister(self.leave)
        self._leaving.set()
        with contextlib.suppress(RuntimeError, OSError):
            self.store.set(f"{_ALIVE}/{self.rank}", _LEFT)

    def wait_for_others(self, most: float = math.inf) -> None:
        """Wait until all others have left: the first process may hold the store that they read.

        Args:
            most: time to wait [s].

        Raises:
            ConnectionError: a process failed, or gives no sign of life.
        """
        began = time.monotonic()
        for rank in range(self.size):
            while rank != self.rank and self.get(f"{_ALIVE}/{rank}") != _LEFT.encode():
                self.check()
                if time.monotonic() - began > most:
                    return
                time.sleep(POLL)

    @contextlib.contextmanager
    def _connection(self) -> Iterator[None]:
        try:
            yield
        except torch.distributed.DistError as error:
            self.check()
            raise ConnectionError(_no_store(error)) from error

    def _live(self) -> None:
        """Give signs of life, and miss those of others; counted in own ones: who slept has missed nothing."""
        beats, heard = 0, {rank: ("", 0) for rank in range(self.size) if rank != self.rank}
        while not self._leaving.wait(BEAT):
            beats += 1
            try:
                self.store.set(f"{_ALIVE}/{self.rank}", str(beats))
                if self.store.check([_FAILED]):
                    rank, _, message = self.store.get(_FAILED).decode().partition(" ")
                    self._lost = "" if int(rank) == self.rank else f"in process {rank} of {self.size}: {message}"
                    return
                for rank, (last, when) in heard.items():
                    name = f"{_ALIVE}/{rank}"
                    sign = self.store.get(name).decode() if self.store.check([name]) else ""
                    if sign != last:
                        heard[rank] = sign, beats
                    elif sign not in ("", _LEFT) and (beats - when) * BEAT > SILENCE:
                        self._lost = (
                            f"process {rank} of {self.size} (counted from 0) has given no sign of life for "
                            f"{SILENCE:.0f} s, so this one stops too: look at its output, then run the same command "
                            "again; what is in the result cache is not read again"
                        )
                        return
            except RuntimeError as error:
                self._lost = "" if self._leaving.is_set() else _no_store(error)
                return


def _no_store(error: BaseException) -> str:
    return (
        "the first process, or the launcher that holds the group's store, is no more, so this one stops too: look at "
        "its output, then run the same command again; what is in the result cache is not read again "
        f"({str(error).partition(chr(10))[0][:200]})"
    )


_peers: Peers | None = None
_begun: collections.Counter[str] = collections.Counter()
"""How often this process has begun each piece of work."""


def peers() -> Peers | None:
    """Return the processes that this one shares work with; None where it works by itself."""
    global _peers
    rank, size = processes.processes()
    if size == 1 or processes.is_alone():
        return None
    store = torch.distributed.distributed_c10d._get_default_store()
    if _peers is None or _peers.store is not store:
        _peers = Peers(store, rank, size)
    return _peers


def begin(what: str) -> str:
    """Return a name for a piece of work that is the same in all processes that begin it as often."""
    _begun[what] += 1
    return f"rope_patch/{what}/{_begun[what]}"


def told_by_first(what: str, make: Callable[[], Any]) -> Any:
    """Return the JSON value that the first process makes, within :func:`connected`.

    Args:
        what: it is, for messages.
        make: returns it; called in the first process alone.

    Raises:
        ConnectionError: in the others: the first process failed, or is no more.
    """
    group = peers()
    if group is None:
        return make()
    name = begin(what)
    if group.rank == 0:
        with processes.alone():
            group.put(name, json.dumps(make()))
    return json.loads(group.wait(name, what))


def forget() -> None:
    """Let go of the group that is left."""
    global _peers
    _peers = None


@contextlib.contextmanager
def connected() -> Iterator[int]:
    """Join the processes of ``torchrun`` or ``accelerate launch`` for the length of a ``with`` block.

    They exchange results only, a few kilobytes for each window of text, so they are joined over gloo wherever the
    models are. Where they are joined already nothing is done, and neither where there is one process.

    Yields:
        The number of this process.
    """
    several = all(name in os.environ for name in VARIABLES) and int(os.environ["WORLD_SIZE"]) > 1
    if not several or torch.distributed.is_initialized():
        yield processes.processes()[0]
        return
    torch.distributed.init_process_group("gloo")
    group = peers()
    if group is None:
        raise RuntimeError("processes are joined inside alone(): leave it first")
    try:
        yield group.rank
        if group.rank == 0:
            group.wait_for_others()
    except BaseException as error:
        group.fail(error)
        if group.rank == 0 and not isinstance(error, ConnectionError):
            with contextlib.suppress(ConnectionError):  # the others are to hear why
                group.wait_for_others(HEARD * BEAT)
        raise
    finally:
        group.leave()
        forget()
        torch.distributed.destroy_process_group()
