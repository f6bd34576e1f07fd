"""Progress of long work, which a command shows as a bar and a program may listen to.

What reads tokens reports them with :func:`advance`, and names what it does with :func:`stage`; nothing happens then
unless somebody listens.

>>> with listen(lambda stage, tokens: print(stage, tokens)), stage("reading"):
...     advance(512)
reading 512
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # commands show their help without torch
    from torch import nn


SECONDS_IN_FILE = 60
"""Time between two lines of a bar that is written to a file [s]."""


def _nobody(*report: object) -> None:
    """Take a report where nobody listens."""


@dataclass(frozen=True)
class _Listeners:
    """The functions to which reports go; without ``known`` its tokens go to ``tokens``."""

    tokens: Callable[[str, int], object] = _nobody
    known: Callable[[int], object] | None = None
    more: Callable[[int], object] = _nobody
    sentence: Callable[[str], object] = _nobody


_NOBODY = _Listeners()
# Context variables, so that threads, and a measurement within another one, have listeners and stages of their own.
_stage: ContextVar[str] = ContextVar("stage", default="")
_listeners: ContextVar[_Listeners] = ContextVar("listeners", default=_NOBODY)


def advance(tokens: int) -> None:
    """Report that a number of tokens was done since the last call, under the present stage."""
    _listeners.get().tokens(_stage.get(), tokens)


def known(tokens: int) -> None:
    """Report a number of tokens whose results are there without reading, which say nothing of the speed."""
    if tokens:
        (_listeners.get().known or advance)(tokens)


def more(tokens: int) -> None:
    """Report that a number of tokens will be done in addition, which could not be known at the beginning."""
    _listeners.get().more(tokens)


def say(sentence: str) -> None:
    """Report a step of the work in a sentence."""
    _listeners.get().sentence(sentence)


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Name what is done within a ``with`` block; a stage within it replaces the name."""
    token = _stage.set(name)
    try:
        yield
    finally:
        _stage.reset(token)


@contextlib.contextmanager
def listen(
    on_tokens: Callable[[str, int], object] | None = None,
    *,
    on_known: Callable[[int], object] | None = None,
    on_more: Callable[[int], object] | None = None,
    on_sentence: Callable[[str], object] | None = None,
) -> Iterator[None]:
    """Listen to the progress within a ``with`` block; what is not listened to goes where it went before.

    Args:
        on_tokens: the function that is called after each layer, with the stage of the work and the number of tokens
            that were just done.
        on_known: the function that is called with a number of tokens whose results were there already; without it they
            are reported to ``on_tokens``, if that is given.
        on_more: the function that is called with a number of tokens that will be done in addition.
        on_sentence: the function that is called with a sentence about each step.
    """
    outer = _listeners.get()
    stored = outer.known
    if on_known or on_tokens:
        stored = on_known
    inner = _Listeners(on_tokens or outer.tokens, stored, on_more or outer.more, on_sentence or outer.sentence)
    token = _listeners.set(inner)
    try:
        yield
    finally:
        _listeners.reset(token)


@contextlib.contextmanager
def unreported() -> Iterator[None]:
    """Report none of the tokens that are done within a ``with`` block: they are not among those announced."""
    with listen(_nobody):  # None would leave the listener outside in place
        yield


@contextlib.contextmanager
def known_before(tokens: int) -> Iterator[None]:
    """Report no known tokens within a ``with`` block before there are more than this number, which nobody announced."""
    outer, left = _listeners.get(), tokens

    def on_known(more: int) -> None:
        nonlocal left
        counted = max(0, more - left)
        left = max(0, left - more)
        if counted and outer.known:
            outer.known(counted)
        elif counted:
            outer.tokens(_stage.get(), counted)

    with listen(on_known=on_known):
        yield


@contextlib.contextmanager
def work(tokens: int, *, reads: int | None = None) -> Iterator[None]:
    """Report a piece of work, such as a window of text, as a number of tokens in all, whatever is read for it.

    The last token is reported at the end of the ``with`` block, when the result is there and stored.

    Args:
        tokens: number of tokens that the work counts as [tokens].
        reads: number of tokens that the model reads meanwhile, by default as many: prompts that share what they begin
            with are read with fewer, and padding is read too [tokens].

    Example:
        >>> reports = []
        >>> with listen(lambda stage, tokens: reports.append(tokens)), work(10, reads=4):
        ...     advance(1)
        ...     advance(3)
        >>> reports
        [2, 7, 1]
    """
    read = reported = 0
    outer = _listeners.get().tokens

    def count(name: str, more: int) -> None:
        nonlocal read, reported
        read += more
        new = min(read * tokens // (reads or tokens or 1), tokens - 1) - reported
        if new > 0:
            reported += new
            outer(name, new)

    with listen(count):
        yield
    if tokens > reported:
        advance(tokens - reported)


@contextlib.contextmanager
def forward_pass(decoder: nn.Module, tokens: int) -> Iterator[None]:
    """Report the tokens of a forward pass of a decoder as it goes, after each of its layers.

    Args:
        decoder: the decoder of a causal language model of transformers, whose ``layers`` are reported one by one;
            without them the pass is reported when it ends.
        tokens: number of tokens that the pass reads, over all rows [tokens].
    """
    layers: Any = getattr(decoder, "layers", ())
    done = 0

    def after_layer(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal done
        done += 1
        advance(tokens * done // len(layers) - tokens * (done - 1) // len(layers))

    # The stack removes the hooks again, even if the pass raises.
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_hook(after_layer).remove)
        yield
    if not layers:
        advance(tokens)


@contextlib.contextmanager
def bar(total: int | None, label: str | None = None, *, hidden: bool = False) -> Iterator[None]:
    """Show a progress bar of tokens on stderr for the length of a ``with`` block, and sentences above it.

    Args:
        total: number of tokens to be read, or None where it is not known; what turns out to be stored is taken off.
        label: text in front of the bar.
        hidden: whether to show no bar.
    """
    from tqdm import tqdm

    often = 0.1 if sys.stderr.isatty() else SECONDS_IN_FILE
    # Tokens are reported by layers, which take unequal times, so the newest one has little weight in the rate.
    options = {"unit": "tok", "unit_scale": True, "smoothing": 0.02, "mininterval": often, "maxinterval": often}
    with tqdm(total=total, desc=label, disable=hidden, **options) as shown:

        def on_tokens(stage: str, tokens: int) -> None:
            shown.set_postfix_str(stage, refresh=False)
            shown.update(tokens)

        def on_more(tokens: int) -> None:
            shown.total = (shown.total or 0) + tokens

        write = functools.partial(shown.write, file=sys.stderr)
        with listen(on_tokens, on_known=lambda tokens: on_more(-tokens), on_more=on_more, on_sentence=write):
            yield
        shown.total = shown.n  # what was announced may have been an estimate
