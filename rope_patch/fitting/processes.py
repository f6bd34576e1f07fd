"""Several processes that fit one table: each has rows of its own, the first one judges and keeps."""

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
    """Return what the first process makes; what it raises, all raise, so that none waits for it."""
    rank, size = processes()
    if size == 1:
        return make()
    made: list[Any] = [None, None]
    if rank == 0:
        try:
            made[0] = make()
        except Exception as error:
            made[1] = error
    torch.distributed.broadcast_object_list(made)
    if made[1] is not None:
        raise made[1]
    return made[0]  # type: ignore[no-any-return]
