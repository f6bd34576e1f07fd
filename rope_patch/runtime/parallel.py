"""The processes of ``torchrun`` or ``accelerate launch`` that work together: which this is, its GPU, what all exchange.

Who watches over them is the launcher: where one process fails, it ends the others, and the same command resumes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, TypeVar

import torch

T = TypeVar("T")

TIMEOUT = timedelta(hours=6)
"""How long a process waits for the others, which may have more to read."""
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher tells each process through its environment."""

_alone: ContextVar[bool] = ContextVar("alone", default=False)
"""Whether this is done within a block of :func:`alone`."""


def processes() -> tuple[int, int]:
    """Return the rank of this process and how many work together; ``(0, 1)`` within :func:`alone`."""
    if _alone.get() or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def choose_device(device: str = "auto") -> str:
    """Return a device for torch: ``"auto"`` is the GPU of this process if there is one, and otherwise the CPU.

    Under ``torchrun`` and ``accelerate launch`` each process has a GPU of its own, and the name of its kind, such as
    ``"cuda"``, means that one. Where there are fewer GPUs, as on a Mac, processes share them.
    """
    gpu = torch.accelerator.current_accelerator(check_available=True)
    if gpu is not None and device in ("auto", gpu.type):
        return f"{gpu.type}:{int(os.environ.get('LOCAL_RANK', 0)) % torch.accelerator.device_count()}"
    if device == "auto":
        return "cpu"
    return device


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let this process evaluate by itself within a ``with`` block: the others share none of its windows and prompts.

    For the first process where the others wait for it, and for processes that evaluate different models.
    """
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


@contextlib.contextmanager
def joined_processes() -> Iterator[int]:
    """Join the processes that a launcher started, for the length of a ``with`` block.

    Where they are joined already nothing is done, and neither where there is one process.

    Yields:
        The rank of this process.
    """
    several = all(name in os.environ for name in LAUNCHER_VARIABLES) and int(os.environ["WORLD_SIZE"]) > 1
    if not several or torch.distributed.is_initialized():
        yield processes()[0]
        return
    from accelerate import PartialState

    # accelerate joins processes on CPUs only when told.
    state = PartialState(cpu=not torch.cuda.is_available(), timeout=TIMEOUT)
    yield state.process_index
    state.destroy_process_group()  # not after an error: the others may be waiting, and the launcher ends them


def from_first_process(make: Callable[[], T]) -> T:
    """Return what the first process makes; where that raises, all raise, so that none waits for it.

    Every process has to call it.

    Raises:
        RuntimeError: raised in the other processes, with the error of the first one.
    """
    rank, size = processes()
    if size == 1:
        return make()
    message: list[Any] = [None, None]
    failed: Exception | None = None
    if rank == 0:
        try:
            # The others wait for the message, so nothing in here may wait for them.
            with alone():
                message[0] = make()
        except Exception as error:
            failed = error
            message[1] = f"{type(error).__name__}: {error}"
    torch.distributed.broadcast_object_list(message)
    if failed is not None:
        raise failed
    if message[1] is not None:
        raise RuntimeError(f"in the first process: {message[1]}")
    result: T = message[0]
    return result


def gather(value: Any) -> list[Any]:
    """Return the values of all processes, in the order of their ranks; every process has to call it."""
    values: list[Any] = [None] * processes()[1]
    torch.distributed.all_gather_object(values, value)
    return values
