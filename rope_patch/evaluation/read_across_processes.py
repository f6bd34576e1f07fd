"""Reads batches of windows or prompts in one process or divided among several, which all get the same results.

Under ``torchrun`` or ``accelerate launch`` processes that each hold a whole model take turns with the batches. The
batches are those that a single process would read, so results are equal to the last digit. The results of all processes
are gathered once, at the end. If the model is sharded over the processes, all of them read every batch together.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import nn

from rope_patch.modeling.scoring import model_hash
from rope_patch.runtime import progress
from rope_patch.runtime.parallel import from_first_process, gather, processes
from rope_patch.runtime.result_cache import PartOfCache, add_new, key

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


@dataclass(frozen=True)
class BatchReader(Generic[T]):
    """Reads the batches of one measurement.

    Attributes:
        score: function of a list of items and the number of tokens to report for the whole batch; it returns a JSON
            value for each item.
        name: function that names an item's value; items with the same name share one value.
        tokens: function that returns how many tokens an item has.
        result_cache: stored values by name; None if none are stored.
    """

    score: Callable[[list[T], int], list[Any]]
    name: Callable[[T], str]
    tokens: Callable[[T], int]
    result_cache: MutableMapping[str, Any] | None

    def read(self, model: nn.Module, batches: Iterable[Sequence[T]]) -> Iterator[tuple[T, Any]]:
        """Yield every item with its value, in order.

        Args:
            model: the model that reads the items.
            batches: lists of items; the items of a list that are not in the result cache are read side by side.

        Raises:
            ValueError: the processes read different models, texts or prompts.
        """
        if reading_processes(model) == 1:
            for batch in self._named(batches):
                yield from self._values_of(batch, self._score(batch))
            return
        rank, size = processes()
        every, count = list[_Batch[T]](), 0
        values: dict[str, Any] = {}
        for batch in self._named(batches):
            every.append(batch)
            # Only batches with something to read are counted, so that a resumed run is divided evenly too.
            if batch.todo and count % size == rank:
                values |= self._score(batch, alone=True)
            else:
                # The progress bar of this process counts a batch of another process when its turn comes.
                progress.advance(self._report_known_count_rest(batch))
            count += bool(batch.todo)
        gathered = _gathered(values, [model_hash(model), *(name for batch in every for name in batch.todo)])
        # The first process writes the file of all results before any other deletes its own part of them.
        from_first_process(lambda: self._add(gathered))
        self._add(gathered)
        if isinstance(self.result_cache, PartOfCache):
            self.result_cache.merged()
        for batch in every:
            yield from self._values_of(batch, gathered)

    def _named(self, batches: Iterable[Sequence[T]]) -> Iterator[_Batch[T]]:
        """Name the value of each item; numbers tell equal items apart where there is no result cache."""
        cache = self.result_cache
        earlier: set[str] = set()
        number = itertools.count()
        for items in batches:
            if cache is None:
                names = [f"{next(number)} {self.name(item)}" for item in items]
            else:
                names = [self.name(item) for item in items]
            pairs = zip(names, items, strict=True)
            # Equal items have the same name and are read once.
            todo = {name: item for name, item in pairs if name not in earlier and name not in (cache or {})}
            if cache is not None:
                earlier.update(names)
            yield _Batch(items, names, todo)

    def _score(self, batch: _Batch[T], *, alone: bool = False) -> dict[str, Any]:
        """Read the items that are not in the result cache, store their values, and report the batch."""
        size, values = self._report_known_count_rest(batch), dict[str, Any]()
        with progress.all_of(size):
            if batch.todo:
                values = dict(zip(batch.todo, self.score(list(batch.todo.values()), size), strict=True))
            self._add(values, alone=alone)
        return values

    def _report_known_count_rest(self, batch: _Batch[T]) -> int:
        """Report the items of a batch that need no reading, and return the number of tokens of the others."""
        size = sum(map(self.tokens, batch.todo.values()))
        progress.known(sum(map(self.tokens, batch.items)) - size)
        return size

    def _add(self, values: dict[str, Any], *, alone: bool = False) -> None:
        """Store values in the result cache; ``alone`` says that only this process has them."""
        if alone and isinstance(self.result_cache, PartOfCache):
            self.result_cache.finish(values)
        elif self.result_cache is not None:
            add_new(self.result_cache, values)

    def _values_of(self, batch: _Batch[T], values: dict[str, Any]) -> Iterator[tuple[T, Any]]:
        """Yield the items of a batch with their values, from ``values`` or from the result cache."""
        cache = self.result_cache or {}
        for name, item in zip(batch.names, batch.items, strict=True):
            if name in values:
                yield item, values[name]
            else:
                yield item, cache[name]


@dataclass(frozen=True, eq=False)
class _Batch(Generic[T]):
    """Items of one batch, the names of their values, and by name the items that still have to be read."""

    items: Sequence[T]
    names: Sequence[str]
    todo: dict[str, T]


def _gathered(mine: dict[str, Any], identity: Any) -> dict[str, Any]:
    """Return the values of all processes.

    Args:
        mine: values that this process has computed, by name.
        identity: JSON value that must be equal in all processes: the model and the names of all values.
    """
    digest = key(identity=identity)
    parts = gather({"identity": digest, "values": mine})
    if any(part["identity"] != digest for part in parts):
        raise ValueError(
            "the processes read different models, texts or prompts: every one needs the same files and options. "
            "For evaluations apart use rope_patch.runtime.parallel.alone()"
        )
    return {name: value for part in parts for name, value in part["values"].items()}
