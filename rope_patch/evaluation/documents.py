"""Texts of the user's own, and their tokens: a string, a file, a folder, a dataset."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rope_patch.evaluation.slices import SLICE, token_arrays
from rope_patch.evaluation.text import Corpus


@dataclass(frozen=True)
class Document:
    """A text with its name."""

    name: str
    text: str


@dataclass(frozen=True, eq=False)
class TokenDocument:
    """A document in the tokens of a model.

    Attributes:
        name: of the document.
        ids: (tokens,) int64, special tokens in front included.
        ends: (tokens,) int64, the byte of the UTF-8 text at which each token ends; None when the tokenizer does not
            tell. Of tokens that share a character the first counts its bytes.
        prefix: the special tokens put in front.
        key_tokens: (tokens,) bool, those that LongPPL is measured on; None where none were chosen.
    """

    name: str
    ids: Tensor
    ends: Tensor | None = None
    prefix: tuple[int, ...] = ()
    key_tokens: Tensor | None = None

    def beginning(self, length: int) -> TokenDocument:
        """Return the first tokens of the document [tokens]."""
        ends = None if self.ends is None else self.ends[:length]
        key_tokens = None if self.key_tokens is None else self.key_tokens[:length]
        return TokenDocument(self.name, self.ids[:length], ends, self.prefix, key_tokens)


Source = str | Path | Corpus | Iterable[Any]


def documents(source: Source, *, column: str = "text", pattern: str = "**/*.txt") -> Iterator[Document]:
    """Yield the documents of a source, one at a time; nothing is read ahead.

    Args:
        source: a text (``str``), a file or folder (``Path``), a built-in :class:`Corpus`, a ``datasets`` dataset
            (streaming or not), or any iterable of texts, mappings or :class:`Document`.
        column: where the text of a mapping is.
        pattern: which files of a folder are read, in the order of their paths.

    Raises:
        FileNotFoundError: no such file or folder.
        ValueError: a file that is not UTF-8, a folder with no file of the pattern, a row without the column, or
            nothing at all to read.
    """
    any_text = False
    for document in _documents(source, column, pattern):
        any_text = any_text or (bool(document.text) and not document.text.isspace())
        yield document
    if not any_text:
        raise ValueError("the source holds no text: it is empty")


def _documents(source: Source, column: str, pattern: str) -> Iterator[Document]:
    match source:
        case str():
            if "\0" not in source and os.path.exists(source):
                raise ValueError(f"a str is the text itself, and {source!r} names a file: give Path({source!r})")
            yield Document("text", source)
        case Path():
            if not source.exists():
                raise FileNotFoundError(f"no file or folder {str(source)!r}")
            paths = _files(source, pattern) if source.is_dir() else [source]
            if not paths:
                raise ValueError(f"folder {str(source)!r} holds no file like {pattern!r}: give pattern=")
            for path in paths:
                name = path.relative_to(source).as_posix() if source.is_dir() else path.name
                try:
                    yield Document(name, path.read_text(encoding="utf-8"))
                except UnicodeDecodeError as error:
                    raise ValueError(f"{name} is not UTF-8 text (byte {error.start})") from None
        case Corpus():
            yield from (Document(f"{source.split}/{i}", text) for i, text in enumerate(source.documents))
        case Mapping():
            raise ValueError(f"a dataset with splits: choose one of {sorted(map(str, source))}")
        case _:
            for i, row in enumerate(source):
                yield _row(row, i, column)


def _files(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(path for path in folder.glob(pattern) if path.is_file())
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"pattern must name files below the folder, as '**/*.txt' does, got {pattern!r}") from error


def _row(row: Any, number: int, column: str) -> Document:
    match row:
        case Document():
            return row
        case str():
            return Document(f"row {number}", row)
        case Mapping():
            if column not in row:
                raise ValueError(f"row {number} has no column {column!r}. Known: {', '.join(map(str, row))}")
            if not isinstance(row[column], str):
                raise ValueError(f"column {column!r} of row {number} must be text, got {type(row[column]).__name__}")
            return Document(f"row {number}", row[column])
    raise TypeError(f"row {number} must be a text or a mapping, got {type(row).__name__}")


def check_tokenizer(tokenizer: Any) -> None:
    """Raise unless a tokenizer can be called.

    Raises:
        ValueError: a name or a folder in its place, or something else.
    """
    if callable(tokenizer):
        return
    if isinstance(tokenizer, str | os.PathLike):
        what = "a string" if isinstance(tokenizer, str) else "a path"
        hint = f": load it with AutoTokenizer.from_pretrained({str(tokenizer)!r})"
    else:
        what, hint = type(tokenizer).__name__, ""
    raise ValueError(f"tokenizer must be a transformers tokenizer, got {what}{hint}")


def prefix_ids(tokenizer: Any, bos: bool | None = None) -> tuple[int, ...]:
    """Return the special tokens that go in front of a text.

    Args:
        tokenizer: of the model.
        bos: put the beginning-of-sequence token there; by default when the tokenizer has one. lm-eval does so only
            for tokenizers that add it themselves: give ``bos=False`` to compare with it on others.

    Raises:
        ValueError: ``bos=True`` and the tokenizer has none, or no tokenizer.
    """
    check_tokenizer(tokenizer)
    if bos is False or (bos is None and tokenizer.bos_token_id is None):
        return ()
    if tokenizer.bos_token_id is None:
        raise ValueError("bos=True, but this tokenizer has no beginning-of-sequence token: leave bos out")
    return (int(tokenizer.bos_token_id),)


def encode(
    tokenizer: Any,
    source: Source,
    *,
    bos: bool | None = None,
    max_tokens: int | None = None,
    column: str = "text",
    pattern: str = "**/*.txt",
) -> Iterator[TokenDocument]:
    """Yield the documents of a source as tokens, one at a time.

    The beginning-of-sequence token stands in front of each document when the tokenizer has one; no other special
    token is added.

    Args:
        tokenizer: of the model.
        source: as in :func:`documents`.
        bos: as in :func:`prefix_ids`.
        max_tokens: stop when so many have been given; the last document is cut there.
        column: as in :func:`documents`.
        pattern: as in :func:`documents`.

    Raises:
        ValueError: as :func:`documents` and :func:`prefix_ids`.
    """
    prefix, left = prefix_ids(tokenizer, bos), max_tokens
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be >= 1, got {max_tokens}")
    for document in documents(source, column=column, pattern=pattern):
        encoded = _encode(tokenizer, document, prefix, left)
        left = None if left is None else left - len(encoded.ids)
        yield encoded
        if left == 0:
            return


def spread_windows(
    tokenizer: Any, source: Source, longest: int, windows: int | None = None
) -> tuple[list[TokenDocument], str]:
    """Return windows spread evenly over a text, each with the special tokens in front, and the digest of the text.

    Args:
        tokenizer: of the model.
        source: as in :func:`documents`.
        longest: length of a window [tokens].
        windows: how many; by default 16, or as many as the text has room for.

    Raises:
        ValueError: too little text.
    """
    whole = source.text if isinstance(source, Corpus) else "\n\n".join(d.text for d in documents(source))
    (stream,) = encode(tokenizer, whole, bos=False)
    prefix = prefix_ids(tokenizer)
    size, total = longest - len(prefix), len(stream.ids)
    if windows is None:
        windows = max(1, min(16, total // size))
    if windows * size > total:
        raise ValueError(
            f"{windows} windows of {longest} tokens need {windows * size} tokens, the text has {total}: "
            "ask for fewer windows, or give a longer text"
        )
    rows = []
    for i, start in enumerate(spread_starts(total, size, windows)):
        ids = torch.cat([torch.tensor(prefix, dtype=torch.long), stream.ids[start : start + size]])
        ends = None
        if stream.ends is not None:
            before = stream.ends[start - 1] if start else torch.tensor(0)
            ends = torch.cat([before.repeat(len(prefix)), stream.ends[start : start + size]])
        rows.append(TokenDocument(f"window {i}", ids, ends, prefix))
    return rows, text_digest(whole)


def text_digest(text: str) -> str:
    """Return the SHA-256 of a text in UTF-8, without a copy of it in memory."""
    digest = hashlib.sha256()
    for begin in range(0, len(text), SLICE):
        digest.update(text[begin : begin + SLICE].encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def spread_starts(total: int, size: int, windows: int) -> list[int]:
    """Return where windows of some size begin that are spread evenly over a text, its two ends included.

    >>> spread_starts(10, 4, 3)
    [0, 3, 6]
    """
    return [round(i * (total - size) / max(1, windows - 1)) for i in range(windows)]


def _encode(tokenizer: Any, document: Document, prefix: tuple[int, ...], limit: int | None = None) -> TokenDocument:
    """Encode a document: all of it, or no more tokens than a limit, special ones included."""
    tokens = token_arrays(tokenizer, document.text, prefix, limit)
    ids = torch.frombuffer(tokens.ids, dtype=torch.long) if tokens.ids else torch.empty(0, dtype=torch.long)
    ends = None
    if tokens.ends is not None:
        ends = torch.frombuffer(tokens.ends, dtype=torch.long) if tokens.ends else ids
    encoded = TokenDocument(document.name, ids, ends, prefix)
    return encoded if limit is None else encoded.beginning(limit)
