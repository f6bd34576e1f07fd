"""Progress within a pass: a piece of work is reported layer by layer, in whole tokens that add up to it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

LOOKS: dict[str, Any] = {"unit": "tok", "unit_scale": True, "smoothing": 0.02}
"""Options of tqdm for a bar of tokens. Steps are layers, which take unequal times, so that the newest one has little
weight in the rate that is shown."""


class Progress:
    """Reports a piece of work, such as a window of text, while a model reads it.

    Args:
        size: what is reported in all [tokens].
        on_progress: called with the number of tokens since the last call.
        reads: tokens that the model reads meanwhile, by default ``size``: prompts that share what they begin with are
            read with fewer, and padding is read too.

    Example:
        >>> reports = []
        >>> progress = Progress(10, reports.append, reads=4)
        >>> progress.reach(1)
        >>> progress.reach(4)
        >>> progress.finish()
        >>> reports
        [2, 7, 1]
    """

    def __init__(self, size: int, on_progress: Callable[[int], None], *, reads: int | None = None) -> None:
        self.size, self.on_progress, self.reads = size, on_progress, reads or max(size, 1)
        self.read = 0.0
        self._reported = 0

    def reach(self, read: float) -> None:
        """Report the work up to a number of tokens that the model has read; the last token waits for the end."""
        self.read = max(self.read, read)
        self._report(min(int(self.size * self.read / self.reads), self.size - 1))

    def finish(self) -> None:
        """Report what is left: the result is there, and stored where it is to be stored."""
        self._report(self.size)

    def _report(self, tokens: int) -> None:
        if tokens > self._reported:
            new, self._reported = tokens - self._reported, tokens
            self.on_progress(new)

    @contextlib.contextmanager
    def within_pass(self, decoder: nn.Module, tokens: int, *, rest: int = 0, passes: int = 1) -> Iterator[None]:
        """Report a forward pass of a decoder after each of its layers, as long as a ``with`` block lasts.

        Args:
            decoder: of a causal language model of transformers; one without ``layers`` is reported at the end.
            tokens: that the pass reads, over all rows.
            rest: how many layers the work behind the decoder counts as, which the caller reports with :meth:`reach`.
            passes: in how many equal parts the tokens are read; those of later passes, such as generated ones, are not
                reported.
        """
        layers: Any = getattr(decoder, "layers", ())
        first, share = self.read, tokens / max(1, passes * len(layers) + rest)
        last = first + tokens - rest * share

        def after_layer(module: nn.Module, args: Any, output: Any) -> None:
            self.reach(min(self.read + share, last))

        with contextlib.ExitStack() as stack:
            for layer in layers:
                stack.callback(layer.register_forward_hook(after_layer).remove)
            yield
        self.reach(last)
