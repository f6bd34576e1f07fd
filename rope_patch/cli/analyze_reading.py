"""What ``rope-patch analyze`` reads: configs, texts, rows, and how many of them where a time is given."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any


def plan_reading(
    read: Callable[..., Any], reading: Any, given: Collection[str], tokens_read: int | None, total: int, within: bool
) -> tuple[Any, int, Any]:
    """Return the rows of the statistics, the tokens of each p, and what is read with them.

    Where a time is given and one row of each text takes too long, rows are shorter, unless the user chose their length.

    Args:
        read: returns rows of as many tokens as it is given, at least one of each text.
        reading: what the analysis reads.
        given: options that were given on the command line.
        tokens_read: of the rows, where the user chose them [tokens].
        total: tokens of all passes.
        within: whether the total is all that a time has room for.

    Raises:
        ValueError: the least that can be read takes longer.
    """
    from dataclasses import replace

    from rope_patch.analysis.reading import PASSES, SHORTEST_ROW, TOKENS, split_tokens

    share, _ = split_tokens(total, reading.p_values)
    if within and not reading.p_values:
        share = min(TOKENS, total // PASSES)
    rows = read(tokens=tokens_read or max(2, share))
    if within and tokens_read is None and "window" not in given and rows.ids.numel() > share:
        reading = replace(reading, window=min(reading.window, max(SHORTEST_ROW, share // len(set(rows.groups)))))
        rows = read(tokens=max(2, share), window=reading.window)
    _, sweep = split_tokens(total, reading.p_values, rows.ids.numel())
    if within and (least := reading.tokens(rows.ids.numel(), sweep)) > total:
        raise ValueError(
            f"at least {least} tokens would be read, and the time has room for {total}: give more time, fewer --p, or "
            "less --tokens in shorter rows (--window)"
        )
    return rows, sweep, reading


def read_texts(paths: Sequence[Path], pattern: str) -> dict[str, Any] | None:
    """Return the documents of each text by its name; None where none is given.

    Raises:
        ValueError: two texts of one name.
        FileNotFoundError: no such text.
    """
    from rope_patch.evaluation.documents import documents

    named = {path.name or str(path): list(documents(path, pattern=pattern)) for path in paths}
    if len(named) < len(paths):
        raise ValueError("two texts have one name: rename one, since results are given by name")
    return named or None


def read_config(source: str) -> Any:
    """Return the config of the text model of a checkpoint, or of an adapter's base."""
    from rope_patch.checkpoints.adapters import adapter_base, is_adapter
    from rope_patch.checkpoints.reading import load_config

    return load_config(adapter_base(source) if is_adapter(source) else source).get_text_config()
