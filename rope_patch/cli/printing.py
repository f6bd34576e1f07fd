"""Printing of all commands: tables for people, JSON for programs, and the command line for reports."""

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
"""Name of the file of finished work in the output folder; the same command reads it when it is run again."""


def command_line() -> str:
    """Return the command line of this process, quoted for a shell."""
    return shlex.join(["rope-patch", *sys.argv[1:]])


def print_json(data: Any) -> None:
    """Print JSON."""
    # NaN is not JSON, and would break the program that reads it: better an error here.
    print(json.dumps(data, indent=2, allow_nan=False))


def new_table(*columns: str, title: str = "", right: Collection[str] = (), **looks: Any) -> Table:
    """Return a table of the package rich without rows.

    Args:
        *columns: headings of the columns.
        title: text above the table.
        right: headings of the columns that are aligned to the right and never wrapped.
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
    """Print a table or text of rich, as wide as the terminal, or ``width`` characters wide if there is none."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else width).print(table)


@contextlib.contextmanager
def resumable(saved: Path, *, again: str = "the same command") -> Iterator[None]:
    """If the user interrupts the ``with`` block, print where finished work is, and how to continue.

    Args:
        saved: the file or folder of the finished work; nothing is printed if it does not exist.
        again: the command that continues.
    """
    try:
        yield
    except KeyboardInterrupt:
        if saved.exists():
            print(f"Finished work is saved in {saved}. Run {again} again to continue from there.", file=sys.stderr)
        raise
