"""Rounds of measurements: all candidates on little text, the better half on more, until the deadline."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from rope_patch.evaluation.compare import UNPATCHED, Comparison, InPlace, Row, comparison_of, methods_in_place
from rope_patch.evaluation.finished_work import FinishedWork, finished_work
from rope_patch.evaluation.needle_suite import NeedleSuite
from rope_patch.evaluation.read_across_processes import reading_processes
from rope_patch.extending.choose import best_half, is_settled, rank
from rope_patch.extending.evidence import measured_in
from rope_patch.options.extend import ExtendSettings
from rope_patch.patching.verify import shortened
from rope_patch.runtime import progress
from rope_patch.runtime.parallel import from_first_process

FIRST_ROUND_WINDOWS = 8
"""Windows of text in the first round at most; each round that follows has twice as many."""
OPTIMISM = 4
"""How many times too slow the speed of short rows may be, beside other work; the first window that is read tells."""


def rounds_of(candidates: int, windows: int) -> list[tuple[int, int]]:
    """Return for each round how many methods are measured, and on how many windows at most.

    The unpatched model is measured besides. The last two methods are compared in two rounds.

    >>> rounds_of(7, 64), rounds_of(1, 10)
    ([(7, 8), (4, 16), (2, 32), (2, 64)], [(1, 8), (1, 10)])

    Args:
        candidates: the number of methods in the first round.
        windows: the number of windows that the text has room for.
    """
    counts = [candidates]
    while counts[-1] > 2:
        counts.append(math.ceil(counts[-1] / 2))
    counts.append(counts[-1])
    return [(count, min(FIRST_ROUND_WINDOWS * 2**number, windows)) for number, count in enumerate(counts)]


def windows_read(rounds: Sequence[tuple[int, int]]) -> int:
    """Return how many windows all rounds read at most, of which each measures only what those before did not."""
    total = 0
    before = 0
    for candidates, windows in rounds:
        total += (candidates + 1) * (windows - before)
        before = windows
    return total


@dataclass
class Clock:
    """The time until a deadline, and how long a window takes.

    Attributes:
        deadline: the end of the time for measuring, by the monotonic clock [s].
        window: how long a window takes under one method, by the last that was read, or as it is expected [s].
        expected: whether nothing was read yet.
    """

    deadline: float
    window: float
    expected: bool = True

    def has_room_for(self, windows: float) -> bool:
        """Tell whether some more windows can be read until the deadline."""
        needed = windows * self.window
        if self.expected:
            needed /= OPTIMISM
        # The first process decides for all, since they have to measure the same.
        room: bool = from_first_process(lambda: time.monotonic() + needed <= self.deadline)
        return room

    @contextlib.contextmanager
    def timing(self, windows: float, work: FinishedWork) -> Iterator[None]:
        """Take the time of a ``with`` block that reads some windows, unless they are found in finished work."""
        stored = len(work.values)
        before = time.monotonic()
        yield
        if len(work.values) > stored:
            self.window = (time.monotonic() - before) / windows
            self.expected = False


def measure(
    model: PreTrainedModel,
    suite: NeedleSuite,
    methods: Sequence[str],
    clock: Clock,
    work: FinishedWork,
    options: ExtendSettings,
) -> list[Comparison]:
    """Measure methods in rounds, and return the comparison of every round; none where not even one window fits.

    The windows are read in turn under all methods of a round, so that all have the same reading wherever it ends. Each
    round has an equal share of the time that is left, and at least one new window.

    Args:
        model: the model, without a patch.
        suite: the windows, of which each round reads a part.
        methods: the methods that compete.
        clock: the deadline.
        work: where finished windows are stored.
        options: the options of the run.
    """
    conditions = not options.train  # a method that will be trained may fail them before
    rounds = rounds_of(len(methods), len(suite.windows))
    remaining = list(methods)
    comparisons: list[Comparison] = []
    windows = 0
    for number, (_, most) in enumerate(rounds):
        progress.say(f"round {number + 1} of {len(rounds)}: {', '.join(map(shortened, remaining))}")
        places = methods_in_place(model, [UNPATCHED, *remaining], suite.spec.longest)
        known: dict[str, FinishedWork | None] = {}
        now = time.monotonic()
        ends = Clock(now + (clock.deadline - now) / (len(rounds) - number), clock.window, expected=False)
        rows: list[Row] = []
        while windows < most and (not rows or ends.has_room_for(len(places))):
            turn = suite.smaller(min(windows + reading_processes(model), most))
            read = read_turn(model, turn, places, clock, work, known, turn.spec.samples - windows)
            if len(read) < len(places):
                break
            rows = read
            windows = turn.spec.samples
            ends.window = clock.window
        if not rows:  # no time is left, or no text
            break
        comparisons.append(comparison_of(model, suite.smaller(windows), rows))
        measured = measured_in(comparisons[-1])
        choice = rank(measured.methods, options.tolerance, conditions=conditions)
        if len(remaining) <= 2 and windows == most and is_settled(choice, options.tolerance, conditions=conditions):
            progress.say("more text would hardly change the choice")
            break
        remaining = best_half(measured.methods, options.tolerance, conditions=conditions)
    return comparisons


def read_turn(
    model: PreTrainedModel,
    suite: NeedleSuite,
    places: dict[str, InPlace],
    clock: Clock,
    work: FinishedWork,
    known: dict[str, FinishedWork | None],
    new: int,
) -> list[Row]:
    """Read the next windows under one method after the other, and return their rows; fewer where no time is left.

    Args:
        model: the model, without a patch.
        suite: all windows so far.
        places: by the string of each method what puts it into the model.
        clock: the deadline.
        work: where finished windows are stored.
        known: the finished work of each method, which is looked up once.
        new: the number of windows that were not read before.
    """
    rows: list[Row] = []
    for name, in_place in places.items():
        if not clock.has_room_for(len(places) - len(rows)):
            break
        progress.more((suite.spec.samples - new) * suite.spec.longest)  # found again, which takes their tokens off
        with in_place() as tables, progress.stage(name):
            if name not in known:
                known[name] = finished_work(model, work, suite.spec.longest)
            with clock.timing(1, work):
                rows.append(Row(name, suite.run(model, resume=known[name]), tables))
    return rows
