"""Counts, times, and lists of layers, pairs and windows as text."""

from __future__ import annotations

import math
from collections.abc import Sequence


def windows_text(count: int, size: int) -> str:
    """Return the number and the length of windows as text.

    >>> windows_text(1, 128), windows_text(16, 4096)
    ('1 window of 128 tokens', '16 windows of 4096 tokens, which do not overlap')
    """
    text = f"{count_text(count, 'window')} of {size} tokens"
    if count > 1:
        text += ", which do not overlap"
    return text


def count_text(count: int, what: str) -> str:
    """Return a number with its noun.

    >>> count_text(1, "sample"), count_text(4, "sample")
    ('1 sample', '4 samples')
    """
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def duration_text(seconds: float) -> str:
    """Return a time in seconds, in minutes from 90 seconds on, or in hours from two on.

    >>> duration_text(0.2), duration_text(100), duration_text(8000)
    ('1 second', '2 minutes', '2 hours')
    """
    if seconds < 90:
        return count_text(math.ceil(seconds), "second")
    if seconds < 2 * 3600:
        return count_text(round(seconds / 60), "minute")
    return count_text(round(seconds / 3600), "hour")


def names_text(names: Sequence[str], most: int | None = None) -> str:
    """Return names as a list within a sentence, of which so many are written out at most.

    >>> names_text(["a", "b", "c"]), names_text(["a", "b", "c"], 1)
    ('a, b and c', 'a and 2 more')
    """
    shown = list(names[:most])
    if len(shown) < len(names):
        shown.append(f"{len(names) - len(shown)} more")
    if len(shown) == 1:
        return shown[0]
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def ranges_text(indices: Sequence[int]) -> str:
    """Return indices as text; consecutive ones are a range.

    >>> ranges_text([0, 3, 4, 5])
    '0, 3-5'
    """
    parts: list[list[int]] = []
    for index in indices:
        if parts and index == parts[-1][1] + 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)
