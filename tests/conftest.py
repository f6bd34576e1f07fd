"""What every test shares: one thread (tiny models are fastest so), no progress bars, no hub, work that is done once."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The tests mean the same on every machine: they fork, and compare to the last digit, which a GPU allows neither of.
# CUDA_VISIBLE_DEVICES=0 shows them one all the same.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

collect_ignore = ["support"]  # no tests; pytest would import each file again under another name


def build_the_thread_pool_anew() -> None:
    """Give a forked process a thread pool: torch's is lost there, and two threads that both miss it race for a new one.

    transformers loads weights in threads; the one that loses ends in "Invalid thread pool!".
    """
    import torch

    with warnings.catch_warnings(action="ignore"):
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=build_the_thread_pool_anew)


LONGEST = ("test_readme.py", "test_packaging.py", "test_demo.py")
"""Files with a test of 10 seconds or more, which begin: at the end, one process would run it and the others wait."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the matrices of families and of engines be written anew."""
    parser.addoption("--write", action="store_true", help="write the results of a matrix in place of comparing them")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest tests."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Any:
    """Collect no garbage while all is imported: nothing is to be freed.

    The test modules import torch, and this one does not: the process that hands out tests to others does without it.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Leave what importing made out of every later garbage collection: a million objects that nothing frees."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture(scope="session", autouse=True)
def one_thread_and_no_progress_bars():
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()


@pytest.fixture(scope="session", autouse=True)
def long_texts_are_encoded_once():
    """The tokens of the built-in text, which dozens of tests measure something in, and which take seconds to find.

    Each tokenizer encodes it once in each process.
    """
    from transformers import PreTrainedTokenizerBase

    from rope_patch.texts import documents

    encode = documents._encode
    results = {}

    def once(tokenizer, document, prefix):
        if len(document.text) < 300_000 or not (isinstance(tokenizer, PreTrainedTokenizerBase) and tokenizer.is_fast):
            return encode(tokenizer, document, prefix)
        key = (tokenizer.backend_tokenizer.to_str(), document.text, prefix)
        if key not in results:
            results[key] = encode(tokenizer, document, prefix)
        return replace(results[key], name=document.name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_encode", once)
        yield


@pytest.fixture
def figures(monkeypatch):
    """Figures as they would have been saved, which is left out: it takes most of the time of a page.

    Where they are saved as PNG they are laid out all the same, since what does not fit raises a warning there.
    """
    from matplotlib.figure import Figure

    from rope_patch.runtime import plots as base

    drawn = []
    monkeypatch.setattr(base, "svg", lambda figure: drawn.append(figure) or "<svg></svg>")
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figure.draw_without_rendering())
    return drawn


@pytest.fixture
def no_links(monkeypatch):
    """A system that refuses links, as Windows does without a right to make them."""

    def refused(*_, **__):
        raise OSError(1314, "A required privilege is not held by the client")

    monkeypatch.setattr("os.symlink", refused)


@pytest.fixture(scope="module")
def reloads_fork():
    """A check in plain transformers runs its program in a fork of a process that has it, not in a new interpreter.

    tests/cli/test_demo.py takes a new interpreter.
    """
    from support.fresh import run_code

    from rope_patch.checkpoints import plain_reload

    def run(command, **_):
        assert command[:2] == [sys.executable, "-c"]
        return run_code(*command[2:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_reload, "subprocess", SimpleNamespace(run=run))
        yield
