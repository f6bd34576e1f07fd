"""The built-in corpus: texts that ship with this package, so that nothing is downloaded."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Literal, get_args

from rope_patch.runtime.packaged import data_path

Split = Literal["train", "heldout", "haystack"]

# A form feed, the sign for a new page: no document holds one.
_BETWEEN_DOCUMENTS = "\n\f\n"


@dataclass(frozen=True)
class Corpus:
    """A part of the built-in corpus, and what identifies it.

    Attributes:
        split: name of the part: train, heldout or haystack.
        documents: the texts, in a fixed order.
        sha256: digest of the documents.
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
    """Return a split of the corpus that every user has. No document is in two splits.

    The README of ``assets/text`` says where the texts come from, under which licences, and how they were cut.

    Args:
        split: ``"train"`` and ``"heldout"``, Python source and documentation, or ``"haystack"``, a novel by chapters.

    Raises:
        ValueError: the split is unknown.
    """
    if split not in get_args(Split):
        raise ValueError(f"unknown split {split!r}. Known: {', '.join(get_args(Split))}")
    text = (data_path("assets") / "text" / f"{split}.txt").read_text(encoding="utf-8")
    documents = tuple(text.split(_BETWEEN_DOCUMENTS))
    return Corpus(split, documents, hashlib.sha256("\0".join(documents).encode()).hexdigest())
