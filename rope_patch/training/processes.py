"""Several processes at one piece of work: what the first one does for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def processes() -> tuple[int, int]:
    """Return the number of this process, and how many there are."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def from_first(make: Callable[[], T]) -> T:
    """Return what the first process makes; where that raises, all raise, so that none waits for it.

    Raises:
        RuntimeError: in the others, with what the first one raised.
    """
    rank, size = processes()
    if size == 1:
        return make()
    told: list[Any] = [None, None]
    failed: Exception | None = None
    if rank == 0:
        try:
            told[0] = make()
        except Exception as error:
            failed, told[1] = error, f"{type(error).__name__}: {error}"
    torch.distributed.broadcast_object_list(told)
    if failed is not None:
        raise failed
    if told[1] is not None:
        raise RuntimeError(f"in the first process: {told[1]}")
    made: T = told[0]
    return made
