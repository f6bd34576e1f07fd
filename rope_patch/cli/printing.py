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

    from rope_patch.reports.page import DataTable, Page


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
        right: headings of the columns that are aligned to the right.
        **looks: further arguments of the table.
    """
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), box=box.SIMPLE_HEAD, title_justify="left", **looks)
    for head in columns:
        table.add_column(escape(head), justify="right" if head in right else "left", overflow="fold")
    return table


FILE_WIDTH = 160
"""Width of a table where there is no terminal [characters]."""


def show(shown: Any) -> None:
    """Print a table or text of rich, as wide as the terminal."""
    from rich.console import Console
    from rich.text import Text

    if sys.stdout.isatty():
        Console().print(shown)
    else:  # a sentence in a file is one line, which a program finds
        Console(width=FILE_WIDTH).print(shown, soft_wrap=isinstance(shown, Text))


VERDICTS: dict[str, tuple[str, str]] = {"safe": ("", "green"), "undecided": ("", "yellow"), "unsafe": ("", "red")}
LOOKS = {"winner": ("★\N{NO-BREAK SPACE}", "bold green"), "tied": ("≈\N{NO-BREAK SPACE}", ""), **VERDICTS}
"""A sign in front of a cell and its colour, by the style of the cell."""
MOST_LETTERS = 26
"""Length of a name up to which it is not broken in a table [characters]."""


def show_page(page: Page) -> None:
    """Print a page: of each section the answer, then its notes and tables; not its figures and folded tables."""
    from rich.text import Text

    from rope_patch.reports.page import DataTable, Note

    show(Text(page.title, style="bold"))
    for section in page.sections:
        show(Text(f"\n{section.title}", style="bold"))
        for sentence in section.answer:
            show(Text(sentence))
        for part in section.parts:
            if isinstance(part, Note):
                show(Text(part.text))
            elif isinstance(part, DataTable) and not part.folded:
                show(_rich_table(part))
                show(Text(part.caption, style="dim"))


def _rich_table(shown: DataTable) -> Table:
    from rich.text import Text

    aligned = ("left", "text", "token", *VERDICTS)
    first = shown.cells[0] if shown.cells else []
    right = [head for head, cell in list(zip(shown.columns, first, strict=True))[1:] if cell.style not in aligned]
    table = new_table(*shown.columns, title=shown.title, right=right)
    for column, below in zip(table.columns, zip(*shown.cells, strict=True), strict=False):
        # Words stay whole in a narrow terminal: names of rows, unless they are long, and verdicts.
        named = column is table.columns[0] or below[-1].style in VERDICTS
        column.no_wrap = named and max(len(cell.text) for cell in below) <= MOST_LETTERS
    for row in shown.cells:
        texts = []
        for cell in row:
            sign, style = LOOKS.get(cell.style, ("", ""))
            texts.append(Text(sign + cell.text, style=style))
            if cell.note:
                texts[-1].append(f"\n{cell.note}", style="dim")
        table.add_row(*texts)
    return table


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
