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


def show(shown: Any) -> None:
    """Print a table or text of rich: words as wide as the terminal, a table as wide as it needs."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    if isinstance(shown, Text):
        # A sentence in a file is one line, which a program finds.
        console.print(shown, soft_wrap=not sys.stdout.isatty())
    else:
        # A terminal that is narrower breaks the lines, and no number: a part of one reads like a number.
        console.width = max(console.width, _width(shown))
        console.print(shown)


def _width(table: Table) -> int:
    """Return the width of a table in which nothing is broken that is not to be broken [characters]."""
    from rich.console import Console

    console = Console()
    return console.measure(table, options=console.options.update_width(1000)).maximum


VERDICTS: dict[str, tuple[str, str]] = {"safe": ("", "green"), "undecided": ("", "yellow"), "unsafe": ("", "red")}
LOOKS = {"winner": ("★ ", "bold green"), "tied": ("≈ ", ""), **VERDICTS}
"""A sign in front of a cell and its colour, by the style of the cell."""
WIDEST_NAME = 48
"""Width of the column of names, above which they are broken [characters]."""


def show_page(page: Page) -> None:
    """Print a page: of each section the answer, then its notes and tables; not its figures and folded tables."""
    from rich.console import Console
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
                table = _rich_table(part, narrow=False)
                if sys.stdout.isatty() and _width(table) > Console().width:
                    table = _rich_table(part, narrow=True)
                show(table)
                show(Text(part.caption, style="dim"))


def _rich_table(shown: DataTable, *, narrow: bool) -> Table:
    """Return a table of rich; a narrow one has its headings on several lines, and no notes, which the report has."""
    from rich.text import Text

    right = []
    columns = list(zip(*shown.cells, strict=True))
    for head, below in list(zip(shown.columns, columns, strict=False))[1:]:
        if below[0].style not in ("left", "text", "token", *VERDICTS):
            right.append(head)
    table = new_table(*shown.columns, title=shown.title, right=right)
    table.columns[0].max_width = WIDEST_NAME
    for column, below in zip(table.columns, columns, strict=False):
        column.no_wrap = below[0].style != "text" and column is not table.columns[0]
        if narrow:
            column.header = Text("\n".join(Text.from_markup(str(column.header)).plain.split()))
    for row in shown.cells:
        texts = []
        for cell in row:
            sign, style = LOOKS.get(cell.style, ("", ""))
            texts.append(Text(sign + cell.text, style=style))
            if cell.note and not narrow:
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
