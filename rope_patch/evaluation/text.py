"""The built-in corpus: English and code that ship with CPython, so that nothing is downloaded."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import platform
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Split = Literal["train", "heldout", "haystack"]
Kind = Literal["reference", "source"]

# Folders of the standard library that some distributions leave out, or that hold tables rather than text.
_LEFT_OUT = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "tkinter",
    "turtledemo",
}

_HOOKS = {"breakpointhook", "displayhook", "excepthook", "unraisablehook"}


@dataclass(frozen=True)
class Corpus:
    """A text with its identity.

    Attributes:
        split: which part.
        documents: the texts, in a fixed order.
        sha256: of the documents; differs between Python versions.
        python_version: the CPython whose files these are.
    """

    split: str
    documents: tuple[str, ...]
    sha256: str
    python_version: str

    @property
    def text(self) -> str:
        """All documents, joined by blank lines."""
        return "\n\n".join(self.documents)


@functools.lru_cache(maxsize=3)
def builtin_text(split: Split) -> Corpus:
    """Return a split of the corpus every user has: language topics, docstrings, standard-library source of CPython.

    A document's own hash decides its split (80 % train, 10 % held out, 10 % haystack), so that no text is in two.

    Args:
        split: ``"train"``, ``"heldout"`` or ``"haystack"``.

    Raises:
        ValueError: unknown split.
        FileNotFoundError: this Python carries no standard-library source.
    """
    if split not in get_args(Split):
        raise ValueError(f"unknown split {split!r}. Known: {', '.join(get_args(Split))}")
    documents = tuple(text for text in _documents() if _split_of(text) == split)
    digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    return Corpus(split, documents, digest, platform.python_version())


@functools.lru_cache(maxsize=2)
def builtin_kind(kind: Kind) -> Corpus:
    """Return the documents of one kind in the training part of the built-in corpus.

    Args:
        kind: ``"reference"``: language topics and docstrings, which are English; ``"source"``: the standard library's
            Python source.

    Raises:
        ValueError: unknown kind.
        FileNotFoundError: as :func:`builtin_text`.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"unknown kind {kind!r}. Known: {', '.join(get_args(Kind))}")
    whole, reference = builtin_text("train"), set(_reference())
    documents = tuple(text for text in whole.documents if (text in reference) == (kind == "reference"))
    digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    return Corpus("train", documents, digest, whole.python_version)


def _split_of(text: str) -> Split:
    share = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 10
    return "heldout" if share == 8 else "haystack" if share == 9 else "train"


def _documents() -> Iterator[str]:
    yield from _reference()
    yield from _source()


def _reference() -> Iterator[str]:
    topics = importlib.import_module("pydoc_data.topics").topics
    yield from (text for _, text in sorted(topics.items()))
    for name in sorted(sys.builtin_module_names):
        yield _docstrings(name)


def _source() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix())
    if not paths:
        raise FileNotFoundError("this Python carries no source of its standard library: give a text of your own")
    for path in paths:
        parts = path.relative_to(root).parts
        if _LEFT_OUT.isdisjoint(parts) and not parts[0].startswith(("config-", "_sysconfigdata")):
            text = path.read_text(encoding="utf-8", errors="ignore").strip()
            if len(text) > 200:
                yield text


def _docstrings(module_name: str) -> str:
    """The docstrings of a module written in C: its source is not among the files.

    What a running program put there does not count: functions written in Python, hooks (read under the name that keeps
    the original), traces of the last error.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # some of them are on their way out
        module = importlib.import_module(module_name)
    names = [name for name in sorted(vars(module)) if not name.startswith(("_", "last_"))]
    members = [getattr(module, f"__{name}__" if name in _HOOKS else name) for name in names]
    own = [member for member in members if callable(member) and not inspect.isfunction(member)]
    texts = [inspect.getdoc(module), *map(inspect.getdoc, own)]
    return f"{module_name}\n\n" + "\n\n".join(dict.fromkeys(text for text in texts if text))
