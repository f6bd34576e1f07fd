"""The progress bar of lm-eval's requests, which counts the tokens that a model reads for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from rope_patch.runtime.progress import LOOKS, Progress, listen


class ReadingBar:
    """A progress bar of tokens, which also counts answers.

    Args:
        bar: the bar of tqdm; its total is the number of tokens.
        answers: how many answers there will be.
        unit: what one answer is for.
    """

    def __init__(self, bar: Any, answers: int, unit: str) -> None:
        self.bar, self.answers, self.unit = bar, answers, unit
        self.given = 0

    def progress(self, tokens: int, reads: int) -> Progress:
        """Return the progress of a part of the work.

        Args:
            tokens: of its texts.
            reads: tokens that the model reads for them, padding included.
        """
        return Progress(tokens, reads=reads)

    def answered(self, count: int) -> None:
        """Count answers."""
        self.given += count
        self.bar.set_postfix_str(f"{self.given} of {self.answers} {self.unit}", refresh=False)

    def finish(self) -> None:
        """Fill the bar: texts that begin one another are read together, with fewer tokens than were announced."""
        self.advance(self.bar.total or 0)

    def advance(self, tokens: int) -> None:
        """Move the bar on."""
        if not self.bar.disable and self.bar.n < self.bar.total:  # a hidden bar does not count
            self.bar.update(min(tokens, self.bar.total - self.bar.n))


@contextlib.contextmanager
def reading_bar(kind: str, tokens: int, answers: int, unit: str, *, hidden: bool) -> Iterator[ReadingBar]:
    """Show how many of the tokens of some requests are read.

    Args:
        kind: what lm-eval calls the requests.
        tokens: that are read for all of them.
        answers: how many answers there will be.
        unit: what one answer is for.
        hidden: show nothing.
    """
    with tqdm(total=tokens, desc=kind, disable=hidden, **LOOKS) as bar:
        shown = ReadingBar(bar, answers, unit)
        with listen(lambda stage, tokens: shown.advance(tokens)):
            yield shown
        shown.finish()
