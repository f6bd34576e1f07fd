"""Read what users write: lengths, times, and misspelt names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the nearest known word, or nothing; case and dashes in front do not count."""
    names = {name.lstrip("-").lower(): name for name in known}
    close = difflib.get_close_matches(word.lstrip("-").lower(), names, n=1)
    return f" Did you mean {names[close[0]]!r}?" if close else ""


def printable(text: str) -> str:
    """Return a text without control characters, with which a file could deceive who reads it on a terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "?", text)


LARGEST_LENGTH = 10**12
"""The largest length that is accepted; more is a typing error [tokens]."""


def parse_length(text: str) -> int:
    """Return a number of tokens; 4k is 4096.

    >>> parse_length("32k"), parse_length("1000")
    (32768, 1000)
    """
    digits = text
    thousands = 1
    if text[-1:].lower() == "k":
        digits = text[:-1]
        thousands = 1024
    # isdigit is true of signs such as ², too, which int refuses.
    if not digits.isascii() or not digits.isdigit():
        raise ValueError(f"a length is a number of tokens such as 4096 or 4k, got {text!r}")
    if int(digits) * thousands > LARGEST_LENGTH:
        raise ValueError(f"a length is at most {LARGEST_LENGTH} tokens, got {text!r}")
    return int(digits) * thousands


GIB = 2**30
"""The number of bytes of a GiB."""


def parse_memory(text: str) -> float:
    """Return a memory in GiB; the unit may follow, and GB is read as GiB, as graphics cards are sold.

    >>> parse_memory("24GB"), parse_memory("80")
    (24.0, 80.0)
    """
    number = text.strip().lower().removesuffix("b").removesuffix("i").removesuffix("g")
    try:
        return float(number)
    except ValueError:
        raise ValueError(f"a memory is a number of GiB such as 24 or 24GB, got {text!r}") from None


_SECONDS = {"s": 1, "m": 60, "h": 3600}


def parse_duration(text: str) -> int:
    """Return a time in seconds; 30m is 1800.

    >>> parse_duration("90s"), parse_duration("30m"), parse_duration("1.5h")
    (90, 1800, 5400)
    """
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?)([smh])", text.lower())
    if not match:
        raise ValueError(f"a time is a number with s, m or h, such as 30m or 1.5h, got {text!r}")
    return round(float(match[1]) * _SECONDS[match[2]])
