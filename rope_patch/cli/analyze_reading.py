"""What ``rope-patch analyze`` reads: configs, texts, rows, and how many of them where a time is given."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def plan_reading(
    model: Any,
    read: Callable[..., Any],
    reading: Any,
    given: set[str],
    tokens_read: int | None,
    paces: Any,
    seconds: float | None,
) -> tuple[Any, int, Any]:
    """Return the rows of the statistics, the tokens of each p, and what is read with them; print what is lost.

    Where a time is given and one row of each text takes too long, rows are shorter, unless the user chose their length.

    Args:
        model: to be analyzed; its size decides where no time is given.
        read: returns rows of as many tokens as it is given, at least one of each text.
        reading: what the analysis reads.
        given: options that were given on the command line.
        tokens_read: of the rows, where the user chose them [tokens].
        paces: of the model.
        seconds: that the analysis may take; None where it may take what it takes [s].

    Raises:
        ValueError: the least that can be read takes longer.
    """
    from dataclasses import replace

    from rope_patch.analysis.reading import SHORTEST_ROW, split_tokens
    from rope_patch.modeling.budget import default_tokens

    total = default_tokens(model)
    rows = read(tokens=tokens_read or split_tokens(total, reading.p_values)[0])
    _, sweep = split_tokens(total, reading.p_values, rows.ids.numel())
    if seconds is None:
        return rows, sweep, reading
    fewer, planned = rows, reading
    if tokens_read is None:
        share, _ = reading.split(seconds, paces)
        if "window" not in given:
            longest = max(SHORTEST_ROW, share // len(set(rows.groups)))
            planned = replace(reading, window=min(reading.window, longest))
        fewer = read(tokens=max(2, share), window=planned.window)
    _, shorter = planned.split(seconds, paces, fewer.ids.numel())
    if (least := planned.seconds(fewer.ids.numel(), shorter, paces)) > seconds:
        raise ValueError(
            f"at least {planned.tokens(fewer.ids.numel(), shorter)} tokens would be read, and that is "
            f"{least / seconds:.1f} times what fits into the time: give more time, fewer --p, or less --tokens in "
            "shorter rows (--window)"
        )
    if lost := planned.cost_of([rows.ids.numel(), fewer.ids.numel()], [sweep, shorter], reading.window):
        print(f"--budget: {lost}", file=sys.stderr)
    return fewer, shorter, planned


def read_texts(paths: Sequence[Path] | None, pattern: str) -> dict[str, Any] | None:
    """Return the documents of each text by its name; None where none is given.

    Raises:
        ValueError: two texts of one name.
        FileNotFoundError: no such text.
    """
    from rope_patch.evaluation.documents import documents

    named = {path.name or str(path): list(documents(path, pattern=pattern)) for path in paths or ()}
    if len(named) < len(paths or ()):
        raise ValueError("two texts have one name: rename one, since results are given by name")
    return named or None


def read_config(source: str) -> Any:
    """Return the config of the text model of a checkpoint, or of an adapter's base."""
    from rope_patch.checkpoints.adapters import adapter_base, is_adapter
    from rope_patch.checkpoints.reading import load_config

    return load_config(adapter_base(source) if is_adapter(source) else source).get_text_config()
