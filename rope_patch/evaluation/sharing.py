"""Batches of windows or prompts, read by one process or shared between several, with the same results in all.

Under ``torchrun`` or ``accelerate launch`` each process that holds a whole model takes the next batch that nobody has
taken, and all of them get every result, in the order in which one process would have measured them. Batches are those
of one process, so results are equal to the last digit. A model that is spread over the processes is read by all of
them together, batch by batch.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import nn

from rope_patch.evaluation.result_cache import ResultCache
from rope_patch.modeling.scoring import fingerprint
from rope_patch.peers import POLL, Peers, begin, peers
from rope_patch.processes import processes

T = TypeVar("T")

SAVING = 1.0
"""How often the first process looks for what the others have finished while it reads itself [s]."""


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
    return processes()[1] if peers() is not None and is_whole(model) else 1


# --- the result cache ------------------------------------------------------------------------------------------------


class SharedCache(MutableMapping[str, Any]):
    """A result cache that all processes have the same of, and that the first process alone writes.

    Args:
        first: what the first process keeps its results in; None in the others.
        values: what was in it when it was shared.
    """

    def __init__(self, first: MutableMapping[str, Any] | None, values: dict[str, Any]) -> None:
        self.first, self._values = first, values

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if self.first is not None and name not in self.first:
            self.first[name] = value
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        raise TypeError("finished work is not deleted: remove the file")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def open_cache(resume: str | Path | MutableMapping[str, Any] | None) -> MutableMapping[str, Any] | None:
    """Return the result cache that ``resume`` names; where several processes share work, what the first one has in it.

    Raises:
        ValueError: a file that is no result cache, or another one than that of the first process.
    """
    group = None if resume is None or isinstance(resume, SharedCache) else peers()
    if group is None:
        return ResultCache(resume) if isinstance(resume, str | Path) else resume
    call = begin("result cache")
    path = str(Path(resume).absolute()) if isinstance(resume, str | Path) else ""
    if group.rank == 0:
        try:
            first: Any = ResultCache(path) if path else resume
            values = dict(first)
        except ValueError as error:
            group.put(call, json.dumps([path, None, str(error)]))
            raise
        group.put(call, json.dumps([path, values, ""]))
        return SharedCache(first, values)
    theirs, values, message = json.loads(group.wait(call, "a result cache"))
    if message:
        raise ValueError(message)
    if theirs != path:
        raise ValueError(
            f"the processes keep results in one file, which the first writes: got {path or 'a mapping'} here and "
            f"{theirs or 'a mapping'} there. For evaluations apart use rope_patch.processes.alone()"
        )
    return SharedCache(None, values)


def longest_first(model: nn.Module) -> bool:
    """Return whether the longest prompts are read first: of several processes none is left with them at the end."""
    return ways(model) > 1


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job(Generic[T]):
    """How the batches of one measurement are read.

    Attributes:
        score: takes items, the tokens that stand for the whole batch, and what is called with the tokens just read;
            returns a JSON value for each item.
        name: of an item's value, the same wherever the value is the same.
        tokens: of an item [tokens].
        result_cache: values by name; None where none are kept.
        on_progress: called with the number of tokens just read, by whichever process.
        about: what the measurement is, for telling it from others.
    """

    score: Callable[[list[T], int, Callable[[int], None]], list[Any]]
    name: Callable[[T], str]
    tokens: Callable[[T], int]
    result_cache: MutableMapping[str, Any] | None
    on_progress: Callable[[int], None]
    about: Any

    def read(self, model: nn.Module, batches: Iterable[Sequence[T]]) -> Iterator[tuple[T, Any]]:
        """Yield every item with its value, in order.

        Args:
            model: that reads.
            batches: of items; those of a batch are read side by side, but for what is in the result cache.

        Raises:
            ConnectionError: another process failed, or is no more.
        """
        group = peers()
        named = self._named(batches, group is not None)
        if group is None or not is_whole(model):
            for batch in named:
                reported = _Count(self.on_progress)
                values = self._score(batch, reported) if batch.todo else {}
                yield from self._finish(batch, values, reported)
        else:
            yield from _Shared(self, group, [self.about, fingerprint(model)]).read(named)

    def _named(self, batches: Iterable[Sequence[T]], verified: bool) -> Iterator[_Batch[T]]:
        """Give each item the name of its value. Without a result cache equal items are read again, and numbered."""
        cache, earlier, number = self.result_cache, set[str](), itertools.count()
        for items in batches:
            if cache is None:
                names = [f"{next(number)} {self.name(item) if verified else ''}" for item in items]
            else:
                names = [self.name(item) for item in items]
            pairs = zip(names, items, strict=True)
            # Equal items have one name, and are read once.
            todo = {name: item for name, item in pairs if name not in earlier and name not in (cache or {})}
            earlier.update(() if cache is None else names)
            yield _Batch(items, names, todo)

    def _score(self, batch: _Batch[T], report: Callable[[int], None]) -> dict[str, Any]:
        size = sum(self.tokens(item) for item in batch.items)
        return dict(zip(batch.todo, self.score(list(batch.todo.values()), size, report), strict=True))

    def _finish(self, batch: _Batch[T], values: dict[str, Any], reported: _Count) -> Iterator[tuple[T, Any]]:
        """Keep the values of a batch, report the rest of its tokens, and yield its items with their values."""
        cache = self.result_cache
        if cache is not None:
            for name, value in values.items():
                if name not in cache:
                    cache[name] = value
        reported(sum(self.tokens(item) for item in batch.items) - reported.total)
        for name, item in zip(batch.names, batch.items, strict=True):
            yield item, values[name] if name in values else (cache or {})[name]


@dataclass(frozen=True, eq=False)
class _Batch(Generic[T]):
    """Items that are read side by side, the names of their values, and the items whose values are not there yet."""

    items: Sequence[T]
    names: Sequence[str]
    todo: dict[str, T]


class _Count:
    """Passes tokens on, and counts them."""

    def __init__(self, on_progress: Callable[[int], None]) -> None:
        self.on_progress, self.total = on_progress, 0

    def __call__(self, tokens: int) -> None:
        if tokens > 0:
            self.total += tokens
            self.on_progress(tokens)


class _Shared(Generic[T]):
    """One measurement that several processes share, through keys in the store of their group.

    Args:
        job: what is read.
        group: the processes.
        about: what the measurement is; processes that measure something else share nothing with this one.
    """

    def __init__(self, job: Job[T], group: Peers, about: Any) -> None:
        self.job, self.group = job, group
        self.call = begin(hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:32])
        self.saved: set[int] = set()
        self.looked = time.monotonic()

    def read(self, batches: Iterable[_Batch[T]]) -> Iterator[tuple[T, Any]]:
        """Yield every item with its value, in order."""
        try:
            yield from self._read(batches)
        except (ConnectionError, GeneratorExit):
            raise
        except BaseException as error:
            self.group.put(f"{self.call}/failed", f"in process {self.group.rank}: {type(error).__name__}: {error}")
            raise

    def _read(self, batches: Iterable[_Batch[T]]) -> Iterator[tuple[T, Any]]:
        waiting: collections.deque[tuple[int | None, _Batch[T], _Count]] = collections.deque()
        numbers, mine = itertools.count(), self._take()
        for batch in batches:
            number, reported = next(numbers) if batch.todo else None, _Count(self._progress)
            waiting.append((number, batch, reported))
            if number == mine:
                self.group.put(f"{self.call}/{number}", json.dumps(self.job._score(batch, reported)))
                mine = self._take()
            while waiting and self._fetch(waiting[0][0]) is not None:
                yield from self._give(*waiting.popleft())
        while waiting:
            yield from self._give(*waiting.popleft())
        if self.group.count(f"{self.call}/left") == self.group.size:  # nobody reads them any more
            for number in range(next(numbers)):
                self.group.delete(f"{self.call}/{number}")

    def _take(self) -> int:
        """Return the number of a batch that no process has taken."""
        return self.group.count(f"{self.call}/taken") - 1

    def _fetch(self, number: int | None) -> dict[str, Any] | None:
        """Return the values of a batch, whoever has read it; None where nobody has yet."""
        if number is None:  # all of it is in the result cache
            return {}
        text = self.group.get(f"{self.call}/{number}")
        return None if text is None else dict(json.loads(text))

    def _give(self, number: int | None, batch: _Batch[T], reported: _Count) -> Iterator[tuple[T, Any]]:
        """Wait for the values of a batch, and yield its items with them."""
        while (values := self._fetch(number)) is None:
            self._tend()
            time.sleep(POLL)
        if set(values) != set(batch.todo):
            raise ValueError(
                "the processes read different texts or prompts: every one needs the same files and options"
            )
        yield from self.job._finish(batch, values, reported)

    def _progress(self, tokens: int) -> None:
        self.job.on_progress(tokens)
        if time.monotonic() - self.looked > SAVING:
            self._tend()

    def _tend(self) -> None:
        """Stop where another process did; the first one keeps what the others have finished so far."""
        self.looked = time.monotonic()
        cache = self.job.result_cache
        try:
            self.group.check()
            failed = self.group.get(f"{self.call}/failed")
            if failed is not None:
                raise ConnectionError(failed.decode())
        finally:
            if isinstance(cache, SharedCache) and cache.first is not None:
                self._save(cache.first)

    def _save(self, kept: MutableMapping[str, Any]) -> None:
        for number in range(self.group.count(f"{self.call}/taken", 0)):
            values = None if number in self.saved else self._fetch(number)
            for name, value in (values or {}).items():
                if name not in kept:
                    kept[name] = value
            if values is not None:
                self.saved.add(number)
