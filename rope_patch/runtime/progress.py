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
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # commands show their help without torch
    from torch import nn


SECONDS_IN_FILE = 60
"""Time between two lines of a bar that is written to a file [s]."""


# A context variable, so that threads, and a measurement within another one, have listeners of their own.
_listening: ContextVar[Mapping[str, Any]] = ContextVar("listening", default=MappingProxyType({"stage": ""}))
"""The functions to which reports go, by the names that :func:`listen` gives them, and the present stage of the work."""


def advance(tokens: int) -> None:
    """Report that a number of tokens was done since the last call, under the present stage."""
    _report("on_tokens", _listening.get()["stage"], tokens)


def more(tokens: int) -> None:
    """Report that a number of tokens will be done in addition; below 0, that results are there without reading."""
    _report("on_more", tokens)


def say(sentence: str) -> None:
    """Report a step of the work in a sentence."""
    _report("on_sentence", sentence)


def _report(name: str, *what: Any) -> None:
    listening = _listening.get()
    if name in listening:
        listening[name](*what)


@contextlib.contextmanager
def _with(**changes: Any) -> Iterator[None]:
    """Change what is listening within a ``with`` block; what is None stays as it is."""
    token = _listening.set({**_listening.get(), **{name: new for name, new in changes.items() if new is not None}})
    try:
        yield
    finally:
        _listening.reset(token)


def stage(name: str) -> AbstractContextManager[None]:
    """Name what is done within a ``with`` block; a stage within it replaces the name."""
    return _with(stage=name)


def listen(
    on_tokens: Callable[[str, int], object] | None = None,
    *,
    on_more: Callable[[int], object] | None = None,
    on_sentence: Callable[[str], object] | None = None,
) -> AbstractContextManager[None]:
    """Listen to the progress within a ``with`` block; what is not listened to goes where it went before.

    Args:
        on_tokens: the function that is called after each layer, with the stage of the work and the number of tokens
            that were just done.
        on_more: the function that is called with a number of tokens that will be done in addition; it is below 0 where
            results are there without reading.
        on_sentence: the function that is called with a sentence about each step.
    """
    return _with(on_tokens=on_tokens, on_more=on_more, on_sentence=on_sentence)


@contextlib.contextmanager
def work(tokens: int, *, reads: int | None = None) -> Iterator[None]:
    """Report a piece of work, such as a window of text, as a number of tokens in all, whatever is read for it.

    The last token is reported at the end of the ``with`` block, when the result is there and stored.

    Args:
        tokens: number of tokens that the work counts as; 0 for what was not announced [tokens].
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
    outer = _listening.get().get("on_tokens")
    if outer is None:
        yield
        return

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
    if "on_tokens" not in _listening.get():  # of a pass over one token, hooks are a part that shows
        yield
        return
    # The stack removes the hooks again, even if the pass raises.
    with work(tokens, reads=len(layers)), contextlib.ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_hook(lambda *_: advance(1)).remove)
        yield


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

        with listen(on_tokens, on_more=on_more, on_sentence=functools.partial(shown.write, file=sys.stderr)):
            yield
        shown.total = shown.n  # what was announced may have been an estimate
