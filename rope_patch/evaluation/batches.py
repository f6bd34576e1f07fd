"""Batches of windows or prompts, read by one process or divided among several, with the same results in all.

Under ``torchrun`` or ``accelerate launch`` the processes that hold a whole model take the batches in turn, those that
one process would read, so results are equal to the last digit. What each has read is gathered once, at the end. A model
that is spread over the processes is read by all of them together, batch by batch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import nn

from rope_patch.modeling.scoring import fingerprint
from rope_patch.runtime import progress
from rope_patch.runtime.finished import PartOfCache, add_new
from rope_patch.runtime.parallel import from_first, gather, processes

T = TypeVar("T")


def is_whole(model: nn.Module) -> bool:
    """Return whether this process holds a whole model, and not a part of one (FSDP, tensor parallelism, ZeRO-3)."""
    distributed: Any = sys.modules.get("torch.distributed.fsdp")  # slow to import, and without it nothing is sharded
    fsdp = () if distributed is None else (distributed.FSDPModule, distributed.FullyShardedDataParallel)
    if any(isinstance(module, fsdp) or (getattr(module, "tp_size", None) or 1) > 1 for module in model.modules()):
        return False
    # DTensor has full_tensor, a parameter of DeepSpeed's ZeRO-3 ds_id.
    return not any(hasattr(p, "full_tensor") or hasattr(p, "ds_id") for p in model.parameters())


def ways(model: nn.Module) -> int:
    """Return how many processes share the reading of a model."""
    return processes()[1] if is_whole(model) else 1


@dataclass(frozen=True)
class BatchReader(Generic[T]):
    """How the batches of one measurement are read.

    Attributes:
        score: takes items, and the tokens to report for the whole batch; returns a JSON value for each item.
        name: of an item's value, the same wherever the value is the same.
        tokens: of an item [tokens].
        result_cache: values by name; None where none are kept.
    """

    score: Callable[[list[T], int], list[Any]]
    name: Callable[[T], str]
    tokens: Callable[[T], int]
    result_cache: MutableMapping[str, Any] | None

    def read(self, model: nn.Module, batches: Iterable[Sequence[T]]) -> Iterator[tuple[T, Any]]:
        """Yield every item with its value, in order.

        Args:
            model: the model that reads.
            batches: the items of a batch are read side by side, but for those in the result cache.

        Raises:
            ValueError: the processes read different things.
        """
        if ways(model) == 1:
            for batch in self._named(batches):
                yield from self._values_of(batch, self._score(batch))
            return
        rank, size = processes()
        every, count = list[_Batch[T]](), 0
        mine: dict[str, Any] = {}
        for batch in self._named(batches):
            every.append(batch)
            if batch.todo and count % size == rank:
                mine |= self._score(batch, alone=True)
            else:
                # A batch that another process reads counts when this one comes past it.
                progress.advance(sum(map(self.tokens, batch.items)))
            count += bool(batch.todo)
        gathered = _gathered(mine, [fingerprint(model), *(name for batch in every for name in batch.todo)])
        from_first(lambda: self._add(gathered))
        self._add(gathered)
        if isinstance(self.result_cache, PartOfCache):
            self.result_cache.merged()
        for batch in every:
            yield from self._values_of(batch, gathered)

    def _named(self, batches: Iterable[Sequence[T]]) -> Iterator[_Batch[T]]:
        """Give each item the name of its value. Without a result cache equal items are read again, and numbered."""
        cache, earlier, number = self.result_cache, set[str](), itertools.count()
        for items in batches:
            if cache is None:
                names = [f"{next(number)} {self.name(item)}" for item in items]
            else:
                names = [self.name(item) for item in items]
            pairs = zip(names, items, strict=True)
            # Equal items have one name, and are read once.
            todo = {name: item for name, item in pairs if name not in earlier and name not in (cache or {})}
            earlier.update(() if cache is None else names)
            yield _Batch(items, names, todo)

    def _score(self, batch: _Batch[T], *, alone: bool = False) -> dict[str, Any]:
        """Read what is not in the result cache, keep it there, and report all tokens of the batch."""
        size, values = sum(map(self.tokens, batch.items)), dict[str, Any]()
        with progress.all_of(size):
            if batch.todo:
                values = dict(zip(batch.todo, self.score(list(batch.todo.values()), size), strict=True))
            self._add(values, alone=alone)
        return values

    def _add(self, values: dict[str, Any], *, alone: bool = False) -> None:
        """Put values into the result cache, which this process alone may have read."""
        if alone and isinstance(self.result_cache, PartOfCache):
            self.result_cache.finish(values)
        elif self.result_cache is not None:
            add_new(self.result_cache, values)

    def _values_of(self, batch: _Batch[T], values: dict[str, Any]) -> Iterator[tuple[T, Any]]:
        """Yield the items of a batch with their values, new ones or those of the result cache."""
        cache = self.result_cache or {}
        for name, item in zip(batch.names, batch.items, strict=True):
            yield item, values[name] if name in values else cache[name]


@dataclass(frozen=True, eq=False)
class _Batch(Generic[T]):
    """Items that are read side by side, the names of their values, and the items whose values are not there yet."""

    items: Sequence[T]
    names: Sequence[str]
    todo: dict[str, T]


def _gathered(mine: dict[str, Any], identity: Any) -> dict[str, Any]:
    """Return the values that all processes have read.

    Args:
        mine: the values by name that this process has read.
        identity: what all of them have read together, for telling whether it is the same.
    """
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    parts = gather({"identity": digest, "values": mine})
    if any(part["identity"] != digest for part in parts):
        raise ValueError(
            "the processes read different models, texts or prompts: every one needs the same files and options. "
            "For evaluations apart use rope_patch.runtime.parallel.alone()"
        )
    return {name: value for part in parts for name, value in part["values"].items()}
