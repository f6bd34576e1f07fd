"""What lm-eval's requests make a model read: said first, with the time that takes, and shown while it is read."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from rope_patch.modeling.budget import MEASURING, SHORTEST, estimate_text, measure_pace
from rope_patch.modeling.progress import LOOKS, Progress
from rope_patch.modeling.scoring import Reader

LITTLE = 8 * SHORTEST
"""Texts with no more tokens together are read without measuring how long it takes, which reads one of the shortest
length at least [tokens]."""

SHARE = 0.05
"""Share of the time of all texts that measuring may take beyond that, about; at most what other commands take."""

ADVICE = "--limit reads less, and so does --metadata samples= or windows= for the tasks of rope_patch"


@dataclass(frozen=True)
class Work:
    """Requests of one kind, before any is answered.

    Attributes:
        kind: what lm-eval calls the requests.
        lengths: of each text that is read for them [tokens].
        count: how many answers there will be.
        unit: what one of these is for.
        scored: share of the tokens that are scored.
        generated: tokens that are generated behind the texts, at most.
    """

    kind: str
    lengths: Sequence[int]
    count: int
    unit: str = "requests"
    scored: float = 0.0
    generated: int = 0

    @property
    def tokens(self) -> int:
        """Tokens to be read."""
        return sum(self.lengths)

    def seconds(self, read: Callable[[Tensor], None], rows: int) -> float | None:
        """Measure how long the texts take; None where measuring would take as long [s].

        Args:
            read: reads ids (rows, tokens) as the texts will be read.
            rows: texts that are read side by side.
        """
        if self.tokens <= LITTLE:
            return None
        longest = max(self.lengths)
        first = min(longest, SHORTEST)
        pace = measure_pace(read, first, seconds=0.0)
        allowed = min(MEASURING, SHARE * pace.seconds(self.tokens, longest))
        if allowed > pace.seconds(first, first):  # else there is no time for longer ones
            pace = measure_pace(read, longest, rows=rows, seconds=allowed)
        return sum(pace.seconds(length, length) for length in self.lengths)

    def text(self, seconds: float | None, processes: int = 1) -> str:
        """Return what is said first.

        Args:
            seconds: that reading takes, where it was measured [s].
            processes: that each answer about as many requests.
        """
        more = f" on each of {processes} processes" if processes > 1 else ""
        if self.generated:
            more += f", not counting up to {self.generated:,} that it generates"
        seconds = None if seconds is None else max(1.0, seconds)  # not "0 s"
        return f"{self.kind}: {estimate_text(self.tokens, seconds, more, advice=ADVICE)}"


@torch.no_grad()
def read_rows(reader: Reader, ids: Tensor, scored: float, past: Any, chunk: int | None) -> None:
    """Read rows of tokens, and score a share of them, or the last one of each chunk, to measure how long it takes.

    Args:
        reader: the model.
        ids: (rows, tokens), any numbers.
        scored: share of the tokens.
        past: cache to read through.
        chunk: tokens per forward pass.
    """
    for _, hidden in reader.read(ids % reader.vocabulary, past, chunk):
        count = max(1, round(scored * hidden.shape[1]))
        for row in hidden:
            reader.score(row[-count:], torch.zeros(count, dtype=torch.long))  # waits for a GPU


class ReadingBar:
    """A progress bar of tokens, which also counts answers.

    Args:
        bar: of tqdm.
        work: that it shows.
    """

    def __init__(self, bar: Any, work: Work) -> None:
        self.bar, self.work = bar, work
        self.answers = 0

    def progress(self, tokens: int, reads: int) -> Progress:
        """Return the progress of a part of the work.

        Args:
            tokens: of its texts.
            reads: tokens that the model reads for them, padding included.
        """
        return Progress(tokens, self._advance, reads=reads)

    def answered(self, count: int) -> None:
        """Count answers."""
        self.answers += count
        self.bar.set_postfix_str(f"{self.answers} of {self.work.count} {self.work.unit}", refresh=False)

    def finish(self) -> None:
        """Fill the bar: texts that begin one another are read together, with fewer tokens than were announced."""
        self._advance(self.work.tokens)

    def _advance(self, tokens: int) -> None:
        if not self.bar.disable and self.bar.n < self.bar.total:  # one that is not shown does not count
            self.bar.update(min(tokens, self.bar.total - self.bar.n))


@contextlib.contextmanager
def reading_bar(work: Work, *, hidden: bool) -> Iterator[ReadingBar]:
    """Show how much of some work is done.

    Args:
        work: to show.
        hidden: show nothing.
    """
    with tqdm(total=work.tokens, desc=work.kind, disable=hidden, **LOOKS) as bar:
        shown = ReadingBar(bar, work)
        yield shown
        shown.finish()


def say_first(text: str) -> None:
    """Print a line on stderr, below a bar that is shown."""
    tqdm.write(text, file=sys.stderr)
