"""The built-in corpus: English text and source code that ship with CPython, so that nothing is downloaded."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Split = Literal["train", "heldout", "haystack"]

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

# IPython, notebooks and command lines replace these functions of sys; Python keeps the originals under other names.
_HOOKS = {name: f"__{name}__" for name in ("breakpointhook", "displayhook", "excepthook", "unraisablehook")}


@dataclass(frozen=True)
class Corpus:
    """A part of the built-in corpus, and what identifies it.

    Attributes:
        split: name of the part: train, heldout or haystack.
        documents: the texts, in a fixed order.
        sha256: digest of the documents, which differ between versions of Python.
    """

    split: str
    documents: tuple[str, ...]
    sha256: str

    @property
    def text(self) -> str:
        """All documents, joined by blank lines."""
        return "\n\n".join(self.documents)


@functools.lru_cache(maxsize=3)
def builtin_text(split: Split) -> Corpus:
    """Return a split of the corpus that every user has: CPython's language topics, docstrings and standard library.

    The hash of a document decides its split (80 % train, 10 % held out, 10 % haystack), so that no text is in two.

    Args:
        split: name of the split: ``"train"``, ``"heldout"`` or ``"haystack"``.

    Raises:
        ValueError: the split is unknown.
        FileNotFoundError: this Python was installed without the source of its standard library.
    """
    if split not in get_args(Split):
        raise ValueError(f"unknown split {split!r}. Known: {', '.join(get_args(Split))}")
    documents = tuple(text for text in _documents() if _split_of(text) == split)
    digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    return Corpus(split, documents, digest)


def _split_of(text: str) -> Split:
    # Its content alone decides, not its place in the list: other documents may come and go between versions of Python.
    share = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 10
    if share == 8:
        return "heldout"
    if share == 9:
        return "haystack"
    return "train"


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
    paths: list[Path] = []
    for folder, inside, files in os.walk(root):
        inside[:] = set(inside) - _LEFT_OUT  # what is left out is most of the files, and is not even listed
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    # Sorted by the text of the path with slashes, so that the order is the same on every system.
    paths.sort(key=lambda path: path.relative_to(root).as_posix())
    if not paths:
        raise FileNotFoundError("this Python carries no source of its standard library: give a text of your own")
    for path in paths:
        # The two prefixes are of files that describe how this Python was built: they differ between machines.
        if not path.relative_to(root).parts[0].startswith(("config-", "_sysconfigdata")):
            text = path.read_text(encoding="utf-8", errors="ignore").strip()
            # Stubs, such as an empty __init__.py, are left out.
            if len(text) > 200:
                yield text


def _docstrings(module_name: str) -> str:
    """Return the docstrings of a module that is written in C, whose source is not among the Python files.

    What a running program has put into the module is left out, so that every process reads the same corpus: functions
    written in Python and the last error. A hook that may have been replaced is read as ``__hook__``, the name under
    which Python keeps the original.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # some of the modules are deprecated
        module = importlib.import_module(module_name)
    names = [name for name in sorted(vars(module)) if not name.startswith(("_", "last_"))]
    members = [getattr(module, _HOOKS.get(name, name)) for name in names]
    own = [member for member in members if callable(member) and not inspect.isfunction(member)]
    texts = [inspect.getdoc(module), *map(inspect.getdoc, own)]
    return f"{module_name}\n\n" + "\n\n".join(dict.fromkeys(text for text in texts if text))
