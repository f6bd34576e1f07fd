"""Reads batches of windows or prompts in one process or divided among several, which all get the same results.

Under ``torchrun`` or ``accelerate launch`` processes that each hold a whole model take turns with the batches. The
batches are those that a single process would read, so results are equal to the last digit. The results of all processes
are gathered once, at the end. If the model is sharded over the processes, all of them read every batch together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from torch import nn

from rope_patch.evaluation.finished_work import FinishedWork
from rope_patch.modeling.identity import model_hash
from rope_patch.runtime import progress
from rope_patch.runtime.parallel import gather, processes
from rope_patch.runtime.result_cache import ResultCache, key

T = TypeVar("T")


def is_whole(model: nn.Module) -> bool:
    """Return whether this process holds a whole model, not a shard of one (FSDP, tensor parallelism, ZeRO-3)."""
    distributed: Any = sys.modules.get("torch.distributed.fsdp")  # slow to import; absent if nothing is sharded
    fsdp = () if distributed is None else (distributed.FSDPModule, distributed.FullyShardedDataParallel)
    if any(isinstance(module, fsdp) or (getattr(module, "tp_size", None) or 1) > 1 for module in model.modules()):
        return False
    # A DTensor has the attribute full_tensor, and a parameter of DeepSpeed's ZeRO-3 has ds_id.
    return not any(hasattr(p, "full_tensor") or hasattr(p, "ds_id") for p in model.parameters())


def reading_processes(model: nn.Module) -> int:
    """Return how many processes divide the batches among them; 1 if the model is sharded."""
    return processes()[1] if is_whole(model) else 1


def read_batches(
    model: nn.Module,
    batches: Iterable[Sequence[T]],
    *,
    score: Callable[[list[T]], Sequence[Any]],
    name: Callable[[T, str], str],
    tokens: Callable[[T], int],
    work: FinishedWork | None,
) -> Iterator[tuple[T, Any]]:
    """Yield the items of batches with their values, in order. What the result cache holds is not measured again.

    Args:
        model: the model that reads the items.
        batches: lists of items; those of a list that are not in the result cache are read side by side.
        score: a function of a list of items, which returns a JSON value for each.
        name: a function of an item and the identity of the model, which names the item's value; items with the same
            name share one value.
        tokens: a function that returns how many tokens an item counts as.
        work: the finished work of this model, see :func:`~rope_patch.evaluation.finished_work.finished_work`; None if
            nothing is stored.

    Raises:
        ValueError: the processes read different models, texts or prompts.
    """
    rank, size = processes()
    divided = reading_processes(model) > 1
    if work is None:
        work = FinishedWork({}, "")
        if divided:  # names are compared between the processes
            work = FinishedWork({}, "", model_hash(model))
    cache = work.values
    identity = work.identity
    # To a file each process writes what it has read itself; what others have read is only kept.
    in_memory = cache.data if isinstance(cache, ResultCache) else cache
    mine: dict[str, Any] = {}
    asked = set[str]()
    every = []
    count = 0
    for items in batches:
        names = [name(item, identity) for item in items]
        todo = {name: item for name, item in zip(names, items, strict=True) if name not in cache and name not in asked}
        left = sum(map(tokens, todo.values()))
        progress.more(left - sum(map(tokens, items)))
        # Only batches with something to read take turns, so that a resumed run is divided evenly too. A batch of
        # another process counts for the progress when its turn comes.
        with progress.work(left):
            if todo and (not divided or count % size == rank):
                values = dict(zip(todo, score(list(todo.values())), strict=True))
                if divided or rank == 0:
                    cache.update(values)
                else:
                    in_memory.update(values)
                mine |= values
        count += bool(todo)
        asked.update(todo)
        every.append((items, names))
    if divided:
        in_memory.update(_gathered(mine, sorted(asked)))
    for items, names in every:
        yield from zip(items, [cache[name] for name in names], strict=True)


def _gathered(mine: dict[str, Any], asked: list[str]) -> dict[str, Any]:
    """Return the values of all processes.

    Args:
        mine: values that this process has computed, by name.
        asked: names of the values of all processes, which tell models, texts and prompts apart.
    """
    digest = key(names=asked)
    parts = gather({"identity": digest, "values": mine})
    if any(part["identity"] != digest for part in parts):
        raise ValueError(
            "the processes read different models, texts or prompts: every one needs the same files and options. For "
            "separate evaluations in each process use rope_patch.runtime.parallel.alone()"
        )
    return {name: value for part in parts for name, value in part["values"].items()}
