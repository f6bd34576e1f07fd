"""Reads the user's texts (a string, a file, a folder or a dataset) and turns them into tokens."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from rope_patch.runtime.captions import count_text
from rope_patch.texts.builtin_text import Corpus


@dataclass(frozen=True)
class Document:
    """A text with its name."""

    name: str
    text: str


@dataclass(frozen=True, eq=False)
class TokenDocument:
    """A document in the tokens of a model.

    Attributes:
        name: name of the document.
        ids: (tokens,) int64, the token ids, beginning with the special tokens.
        ends: (tokens,) int64, for each token the number of bytes of the UTF-8 text up to its end; None if the tokenizer
            does not tell. If several tokens share a character, the first of them counts all its bytes.
        prefix: ids of the special tokens that were put in front.
        key_tokens: (tokens,) bool, the tokens whose prediction needs the long context; None if nobody looked.
    """

    name: str
    ids: Tensor
    ends: Tensor | None = None
    prefix: tuple[int, ...] = ()
    key_tokens: Tensor | None = None


PIECE_CHARACTERS = 2**22
"""Longest piece of a text that is encoded in one call [characters]: until a call returns, a tokenizer holds some 200
bytes for each character."""

Source = str | Path | Corpus | Iterable[Any]


def documents(source: Source) -> Iterator[Document]:
    """Yield the documents of a source one at a time, each read only when it is asked for.

    Args:
        source: a text (``str``), a file or a folder of .txt files (``Path``), a built-in :class:`Corpus`, a
            ``datasets`` dataset (streaming or not), or any iterable of texts, :class:`Document` or mappings with a
            ``text``.

    Raises:
        FileNotFoundError: the file or folder does not exist.
        ValueError: a file is not UTF-8, a folder holds no .txt file, a row has no text, or there is no text
            at all.
    """
    any_text = False
    for document in _documents(source):
        any_text = any_text or (bool(document.text) and not document.text.isspace())
        yield document
    # A stream has to be read to its end before it is known to hold no text.
    if not any_text:
        raise ValueError("the source holds no text: it is empty")


def _documents(source: Source) -> Iterator[Document]:
    match source:
        case str():
            if "\0" not in source and os.path.exists(source):
                raise ValueError(f"a str is the text itself, and {source!r} names a file: give Path({source!r})")
            yield Document("text", source)
        case Path():
            if not os.path.exists(source):  # unlike Path.exists it also answers for a text too long to be a name
                raise FileNotFoundError(f"no file or folder {str(source)!r:.200}")
            if not source.is_file() and not source.is_dir():
                raise ValueError(f"{str(source)!r} is a pipe or a device, which is read once: give a file")
            folder = source.parent
            paths = [source]
            if source.is_dir():
                folder = source
                paths = sorted(path for path in source.glob("**/*.txt") if path.is_file())
            if not paths:
                raise ValueError(f"folder {str(source)!r} holds no .txt file")
            for path in paths:
                name = path.relative_to(folder).as_posix()
                try:
                    yield Document(name, path.read_text(encoding="utf-8"))
                except UnicodeDecodeError as error:
                    raise ValueError(f"{name} is not UTF-8 text (byte {error.start})") from None
        case Corpus():
            yield from (Document(f"{source.split}/{i}", text) for i, text in enumerate(source.documents))
        # The datasets library returns a mapping from splits to data sets if no split is named.
        case Mapping():
            raise ValueError(f"a dataset with splits: choose one of {sorted(map(str, source))}")
        case _:
            for i, row in enumerate(source):
                match row:
                    case Document():
                        yield row
                    case str(text) | {"text": str(text)}:
                        yield Document(f"row {i}", text)
                    case _:
                        raise TypeError(
                            f"row {i} must be a text, or a mapping with a text under 'text', got {row!r:.80}"
                        )


def whole_text(source: Source) -> str:
    """Return the documents of a source, as :func:`documents` yields them, joined by blank lines."""
    return "\n\n".join(document.text for document in documents(source))


def check_tokenizer(tokenizer: Any) -> None:
    """Raise unless the argument is a tokenizer, which can be called.

    Raises:
        ValueError: it is the name or the folder of a tokenizer, or anything else.
    """
    if not callable(tokenizer):
        raise ValueError(
            f"tokenizer must be a transformers tokenizer, got {type(tokenizer).__name__}: load one with "
            "AutoTokenizer.from_pretrained"
        )


def prefix_ids(tokenizer: Any) -> tuple[int, ...]:
    """Return the special tokens that go in front of a text: the beginning-of-sequence token if there is one.

    lm-eval puts it there only if the tokenizer adds it by itself.

    Raises:
        ValueError: the argument is not a tokenizer.
    """
    check_tokenizer(tokenizer)
    if tokenizer.bos_token_id is None:
        return ()
    return (int(tokenizer.bos_token_id),)


def encode(tokenizer: Any, source: Source, prefix: Sequence[int] | None = None) -> Iterator[TokenDocument]:
    """Yield the documents of a source as tokens, one at a time.

    The beginning-of-sequence token stands in front of each document when the tokenizer has one; no other special
    token is added.

    Args:
        tokenizer: the tokenizer of the model that will read the tokens.
        source: the texts, as :func:`documents` takes them.
        prefix: special tokens that are put in front of each document; by default those of :func:`prefix_ids`.

    Raises:
        ValueError: as for :func:`documents` and :func:`prefix_ids`.
    """
    check_tokenizer(tokenizer)
    prefix = prefix_ids(tokenizer) if prefix is None else tuple(prefix)
    for document in documents(source):
        yield _encode(tokenizer, document, prefix)


def spread_windows(
    tokenizer: Any, source: Source, longest: int, windows: int | None = None, *, most: int = 8, option: str = "text"
) -> tuple[list[TokenDocument], str]:
    """Return windows that are spread evenly over a text, each beginning with the special tokens, and the text's digest.

    A single window comes from the middle of the text.

    Args:
        tokenizer: the tokenizer of the model that will read the windows.
        source: the text, as :func:`documents` takes it.
        longest: length of each window, special tokens included [tokens].
        windows: number of windows; by default ``most``, or fewer if the text has no room for so many.
        most: number of windows by default.
        option: the option that gave the text, which an error names.

    Raises:
        ValueError: the text is too short for the windows.
    """
    whole = whole_text(source)
    # The special tokens are left out here, because every window gets them in front.
    (stream,) = encode(tokenizer, whole, prefix=())
    prefix = prefix_ids(tokenizer)
    size = longest - len(prefix)
    total = len(stream.ids)
    if windows is None:
        # At least one, so that a text shorter than one window meets the error below, which says how much is needed.
        windows = max(1, min(most, total // size))
    if windows * size > total:
        advice = f"give a longer text ({option}, --{option})"
        if windows > 1:
            advice = f"ask for fewer windows, or {advice}"
        raise ValueError(
            f"{windows * size} tokens of text are needed for {count_text(windows, 'window')} of {longest} tokens, and "
            f"the text has {total}: {advice}"
        )
    return cut_windows(stream, prefix, size, windows), text_digest(whole)


def cut_windows(stream: TokenDocument, prefix: tuple[int, ...], size: int, windows: int) -> list[TokenDocument]:
    """Return windows that are spread evenly from the start of a text to its end; a single one comes from the middle.

    Args:
        stream: the text, without special tokens.
        prefix: ids of the special tokens that go in front of each window.
        size: number of tokens that each window has of the text.
        windows: number of windows, for which the text has room.
    """
    rows = []
    spare = len(stream.ids) - size
    for i in range(windows):
        # A book begins with its title page and contents, which no other page is like.
        start = spare // 2
        if windows > 1:
            start = round(i * spare / (windows - 1))
        ids = torch.cat([torch.tensor(prefix, dtype=torch.long), stream.ids[start : start + size]])
        ends = None
        if stream.ends is not None:
            # The special tokens end where the text before the window ends: they count no bytes, and the first token of
            # the window counts its own alone.
            before = stream.ends[start - 1] if start else torch.tensor(0)
            ends = torch.cat([before.repeat(len(prefix)), stream.ends[start : start + size]])
        rows.append(TokenDocument(f"window {i}", ids, ends, prefix))
    return rows


def text_digest(text: str) -> str:
    """Return the SHA-256 of a text, encoded as UTF-8."""
    # Without surrogatepass a text with a lone surrogate could not be encoded.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _encode(tokenizer: Any, document: Document, prefix: tuple[int, ...]) -> TokenDocument:
    """Encode a document piece by piece; only a "fast" tokenizer tells which characters each token covers."""
    fast = bool(getattr(tokenizer, "is_fast", False))
    ids = [torch.tensor(prefix, dtype=torch.long)]
    ends = [torch.zeros(len(prefix), dtype=torch.long)]
    before = 0
    for piece in _pieces(document.text):
        # The text is read in windows, so it may be longer than the model's context: verbose=False suppresses the
        # tokenizer's warning.
        coded = tokenizer(piece, add_special_tokens=False, verbose=False, return_offsets_mapping=fast)
        ids.append(torch.tensor(coded["input_ids"], dtype=torch.long))
        if fast and coded["input_ids"]:
            # Offsets count characters, and UTF-32 gives each character one number, from which follows its size in
            # UTF-8: one byte up to U+007F, two up to U+07FF, three up to U+FFFF, then four.
            points = numpy.frombuffer(piece.encode("utf-32-le", "surrogatepass"), dtype=numpy.uint32)
            sizes = 1 + (points > 0x7F).astype(numpy.int64) + (points > 0x7FF) + (points > 0xFFFF)
            bytes_before = torch.from_numpy(numpy.concatenate([[before], before + sizes.cumsum()]))
            stops = torch.tensor([stop for _, stop in coded["offset_mapping"]])
            # The maximum so far keeps ends from falling, whatever offsets a tokenizer gives to tokens that share a
            # character.
            ends.append(bytes_before[stops].cummax(0).values)
            before = int(bytes_before[-1])
    return TokenDocument(document.name, torch.cat(ids), torch.cat(ends) if fast else None, prefix)


def _pieces(text: str) -> Iterator[str]:
    """Cut a text at line ends into pieces of at most :data:`PIECE_CHARACTERS`; nearly all texts are one piece."""
    begin = 0
    while len(text) - begin > PIECE_CHARACTERS:
        stop = text.rfind("\n", begin, begin + PIECE_CHARACTERS) + 1
        if stop <= begin:  # no line ends here
            stop = begin + PIECE_CHARACTERS
        yield text[begin:stop]
        begin = stop
    yield text[begin:]
