"""What commands print: tables for people, JSON for programs, and the command itself for reports."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


RESULT_CACHE = "finished.jsonl"
"""Finished work, in the output folder: the same command reads it when it is run again."""


def command_line() -> str:
    """The command as it was typed."""
    return shlex.join(["rope-patch", *sys.argv[1:]])


def print_json(data: Any) -> None:
    """Print for machines."""
    print(json.dumps(data, indent=2, allow_nan=False))


def new_table(*columns: str, title: str = "", right: Collection[str] = (), **looks: Any) -> Table:
    """Return a table of rich without rows.

    Args:
        *columns: the heads.
        title: above the table.
        right: heads of the columns that are aligned to the right, whole on a line.
        **looks: further arguments of the table.
    """
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), box=box.SIMPLE_HEAD, title_justify="left", **looks)
    for head in columns:
        whole = head in right
        table.add_column(escape(head), justify="right" if whole else "left", no_wrap=whole, overflow="fold")
    return table


def show(table: Any, width: int = 140) -> None:
    """Print a table or text of rich, as wide as the terminal or, elsewhere, as a number of characters."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else width).print(table)


@contextlib.contextmanager
def resumable(saved: Path, *, again: str = "the same command") -> Iterator[None]:
    """Where the user interrupts this block, say where finished work is, and how to continue.

    Args:
        saved: file or folder of the finished work; nothing is printed where it does not exist.
        again: the command that continues.
    """
    try:
        yield
    except KeyboardInterrupt:
        if saved.exists():
            print(f"Finished work is saved in {saved}. Run {again} again to continue from there.", file=sys.stderr)
        raise
