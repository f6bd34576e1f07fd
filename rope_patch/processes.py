"""Work that the first of several processes does for all."""

from __future__ import annotations

import collections
import contextlib
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch

T = TypeVar("T")

PATIENCE = timedelta(minutes=1), timedelta(minutes=30)
"""How long a process waits for the first one before it says so, and before it gives up."""

_DONE = "done"
_pieces: collections.Counter[str] = collections.Counter()
"""How often this process has begun each named piece of work; processes that work together have the same counts."""
_alone = 0
"""How many blocks of :func:`alone` this process is in."""


def processes() -> tuple[int, int]:
    """Return the number of this process, and how many there are."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let this process evaluate by itself within a ``with`` block: the others share none of its windows and prompts.

    For the first process where the others wait for it, and for processes that evaluate different models.
    """
    global _alone
    _alone += 1
    try:
        yield
    finally:
        _alone -= 1


def is_alone() -> bool:
    """Return whether this process is in a block of :func:`alone`."""
    return _alone > 0


def from_first(make: Callable[[], T]) -> T:
    """Return what the first process makes; where that raises, all raise, so that none waits for it.

    Every process has to call it.

    Raises:
        RuntimeError: in the others, with what the first one raised.
    """
    rank, size = processes()
    if size == 1 or is_alone():
        return make()
    message: list[Any] = [None, None]
    failed: Exception | None = None
    if rank == 0:
        try:
            with alone():
                message[0] = make()
        except Exception as error:
            failed, message[1] = error, f"{type(error).__name__}: {error}"
    torch.distributed.broadcast_object_list(message)
    if failed is not None:
        raise failed
    if message[1] is not None:
        raise RuntimeError(f"in the first process: {message[1]}")
    result: T = message[0]
    return result


@contextlib.contextmanager
def first_alone(name: str) -> Iterator[bool]:
    """Say whether this process does a piece of work that the first one does for all; the others wait at the end.

    Unlike :func:`from_first` the first process may come here alone, as in ``if rank == 0: save(…)``: it tells the
    others through the store of the process group, and waits for none.

    Args:
        name: of the piece of work, the same in all processes.

    Raises:
        RuntimeError: in the others: the first one failed, or never came.
    """
    rank, size = processes()
    if size == 1:
        yield True
        return
    _pieces[name] += 1
    store, key = torch.distributed.distributed_c10d._get_default_store(), f"rope_patch/{name}/{_pieces[name]}"
    if rank:
        yield False
        _wait(store, key, name)
        return
    try:
        with alone():
            yield True
    except BaseException as error:
        store.set(key, f"{type(error).__name__}: {error}")
        raise
    store.set(key, _DONE)


def _wait(store: Any, key: str, name: str) -> None:
    first, last = PATIENCE
    try:
        store.wait([key], first)
    except RuntimeError:
        warnings.warn(f"still waiting for the first process to finish: {name}", stacklevel=5)
        try:
            store.wait([key], last)
        except RuntimeError as error:
            raise RuntimeError(f"the first process did not finish, or never began: {name}") from error
    message = store.get(key).decode()
    if message != _DONE:
        raise RuntimeError(f"in the first process: {message}")
