"""The texts of a fit: what it is fitted to, what is held out, and the second domain on which the choice looks too."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rope_patch.evaluation.documents import Source, TokenDocument, documents, spread_windows
from rope_patch.evaluation.intervals import OF_PROMPTS, OF_WINDOWS
from rope_patch.evaluation.text import Corpus, builtin_kind

VALIDATION = 0.1
"""Share of the text, at its end, that is held out: the table is chosen on it."""
LIMIT = 64_000_000
"""The most characters that are read of a text."""
FEW_WINDOWS = 4
"""With fewer windows the interval of a difference says little."""
POPULATION = f"{OF_WINDOWS} {OF_PROMPTS}"
CARRIES_OVER = (
    "A gain on text like the fit's need not carry over to other text. In tests with another small model (512 to 2048 "
    "tokens, fitted to stories) fitted tables read stories 1 to 4.6 % better than YaRN's table at all positions, and "
    "the far positions of two novels significantly worse in three fits of four, by 1.4 to 4.6 %. Compare the table "
    "with the one it started from on text of your own."
)
"""What is known of fitted tables on other text, stated wherever a gain is."""
LOSS_ALONE = (
    "with retrieval=0 (--retrieval 0) the table was fitted by the loss of text alone: no prompt took part, so it may "
    "answer fewer of them, and it is fits of this kind that were found worse on text of another kind"
)


@dataclass(frozen=True)
class TextPart:
    """A text that rows are drawn from.

    Attributes:
        name: of the text.
        text: without what is held out.
        share: of the rows, on average.
    """

    name: str
    text: str
    share: float = 1.0


@dataclass(frozen=True)
class FitTexts:
    """What a table is fitted to, and the held-out text that it is chosen on.

    Attributes:
        parts: that rows are drawn from.
        held_out: the last tenths of the given texts.
        why: why these are the parts, as a sentence.
    """

    parts: tuple[TextPart, ...]
    held_out: str
    why: str

    @property
    def digest(self) -> str:
        """Digest of the text to fit to."""
        whole = "\0".join(part.text for part in self.parts)
        return hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return what rows were drawn from, for JSON."""
        return {"fitted_to": {part.name: part.share for part in self.parts}, "why": self.why, "sha256": self.digest}

    def describe(self) -> str:
        """Return what the rows are drawn from, with shares where there are several texts."""
        if len(self.parts) == 1:
            return self.parts[0].name
        return " and ".join(f"{part.share:.0%} {part.name}" for part in self.parts)


def fit_texts(data: Source | Mapping[str, Source] | None, mix: float) -> FitTexts:
    """Return the texts of a fit.

    One source is taken as one kind of text, whatever it holds, and Python code is mixed into its rows. Several, in a
    ``dict`` by name, are taken as several kinds, drawn from in equal parts, and nothing is added.

    Args:
        data: one source, or several by name; None for Python code alone.
        mix: share of the rows that are drawn from Python code where the data is of one kind.
    """
    if data is None:
        sources: Mapping[str, Source] = {_name(None): builtin_kind("source")}
    elif type(data) is dict:  # a dataset with splits is a mapping, too: documents() refuses it
        sources = data
    else:
        source = cast("Source", data)
        sources = {_name(source): source}
    if not sources:
        raise ValueError("data names no text: give at least one")
    split = {name: _split(source) for name, source in sources.items()}
    parts = [TextPart(name, text, 1 / len(split)) for name, (text, _) in split.items()]
    held_out = "\n\n".join(held for _, held in split.values())
    if len(parts) > 1:
        why = "several texts are several kinds, and nothing was added"
    elif data is None or isinstance(data, Corpus):
        why = "no text was given, and there is no other text to mix in: give text like that of your use"
        why = why if data is None else "the built-in text was given, and there is no other text to mix in"
    elif not mix:
        why = "one text is one kind, and nothing was added, as mix=0 (--mix 0) asks"
    else:
        why = "one text is one kind, so Python code was mixed in; mix=0 (--mix 0) leaves it out"
        (own,) = parts
        code = builtin_kind("source")
        parts = [TextPart(own.name, own.text, 1 - mix), TextPart(_of_python("source"), code.text, mix)]
    return FitTexts(tuple(parts), held_out, why)


@dataclass(frozen=True, eq=False)
class SecondDomain:
    """Windows of text of another kind than the fit's.

    Attributes:
        name: of the text; "" where there is none.
        windows: each as long as the target.
        sha256: digest of the text.
        why: why there is none, as a sentence; "" where there is one.
    """

    name: str = ""
    windows: Sequence[TokenDocument] = ()
    sha256: str = ""
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return what was looked at, for JSON."""
        return {"text": self.name or None, "windows": len(self.windows), "sha256": self.sha256, "why_none": self.why}


def second_domain(
    tokenizer: Any, second: Source | bool, data: Source | Mapping[str, Source] | None, longest: int, windows: int | None
) -> SecondDomain:
    """Return the windows of the second domain: as many as asked for, or as many as the text has room for.

    Args:
        tokenizer: of the model.
        second: a text; True for the reference documentation of Python, False for none.
        data: that the fit is made on.
        longest: length of a window [tokens].
        windows: how many are asked for.

    Raises:
        ValueError: a given text that is shorter than one window.
    """
    if second is False:
        return SecondDomain(why="no second domain was looked at, as second=False (--second-text none) asks")
    if second is True and isinstance(data, Corpus):
        return SecondDomain(why="no second domain was looked at: the fit was made on the whole built-in text")
    source = builtin_kind("reference") if second is True else second
    name = _of_python("reference") if second is True else _name(source)
    try:
        rows, digest = spread_windows(tokenizer, source, longest, windows)
    except ValueError:  # too short for so many
        try:
            rows, digest = spread_windows(tokenizer, source, longest)
        except ValueError:
            if second is not True:
                raise
            why = f"no second domain was looked at: the built-in one has less than {longest} tokens"
            return SecondDomain(why=f"{why}, give second= (--second-text)")
    return SecondDomain(name, rows, digest)


def _split(source: Source) -> tuple[str, str]:
    """Return the text to fit to and the held-out text."""
    if isinstance(source, Corpus):
        whole = source.text[:LIMIT]
    else:
        parts, size = [], 0
        for document in documents(source):
            parts.append(document.text[: LIMIT - size])
            size += len(parts[-1])
            if size >= LIMIT:
                break
        whole = "\n\n".join(parts)
    cut = round(len(whole) * (1 - VALIDATION))
    return whole[:cut], whole[cut:]


def _name(source: Source | None) -> str:
    match source:
        case None:
            return _of_python("source")
        case Corpus():
            return f"text that ships with CPython {source.python_version}"
        case Path():
            return source.name
    return "the given text"


def _of_python(kind: str) -> str:
    what = "code" if kind == "source" else "documentation"
    return f"{what} that ships with CPython {platform.python_version()}"
