"""Printing of all commands: tables for people, JSON for programs, and the command line for reports."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rope_patch.runtime import page as pages
from rope_patch.runtime.folders import write_atomically
from rope_patch.runtime.page import DataTable, Note, Page


def command_line() -> str:
    """Return the command line of this process, quoted for a shell."""
    return shlex.join(["rope-patch", *sys.argv[1:]])


def print_json(data: Any) -> None:
    """Print JSON."""
    # NaN is not JSON, and would break the program that reads it: better an error here.
    print(json.dumps(data, indent=2, allow_nan=False))


def new_table(*columns: str, **looks: Any) -> Table:
    """Return a table of the package rich without rows; ``looks`` are further arguments of the table."""
    table = Table(box=box.SIMPLE_HEAD, title_justify="left", **looks)
    for head in columns:
        table.add_column(escape(head), overflow="fold")
    return table


FILE_WIDTH = 160
"""Width of a table where there is no terminal [characters]."""


def show(shown: Any) -> None:
    """Print a table or text of rich, as wide as the terminal."""
    width = None  # that of the terminal
    if not sys.stdout.isatty():
        width = FILE_WIDTH
    # A sentence in a file is one line, which a program finds.
    soft_wrap = isinstance(shown, Text) and width is not None
    # A table that is wider than the terminal is broken there, and not cut off.
    Console(width=width).print(shown, soft_wrap=soft_wrap, crop=False)


LOOKS = {
    "winner": ("★ ", "bold green"),
    "tied": ("≈ ", ""),
    "safe": ("", "green"),
    "undecided": ("", "yellow"),
    "unsafe": ("", "red"),
}
"""A sign in front of a cell and its colour, by the style of the cell."""
WIDEST_TEXT = 48
"""Width of a column of names or sentences, above which they are broken [characters]."""


def show_page(page: Page) -> None:
    """Print a page: of each section the answer, then its notes and tables; not its figures and folded tables.

    What explains a table is printed once, though several sections say it.
    """
    said = set()

    def explain(text: str, style: str = "") -> None:
        if text not in said:
            show(Text(text, style=style))
        said.add(text)

    show(Text(page.title, style="bold"))
    for section in page.sections:
        show(Text(f"\n{section.title}", style="bold"))
        for sentence in section.answer:
            show(Text(sentence))
        for part in section.parts:
            if isinstance(part, Note):
                explain(part.text)
            elif isinstance(part, DataTable) and not part.folded:
                show_table(part)
                explain(part.caption, "dim")


def write_and_show(
    options: Any,
    files: Sequence[str],
    json_text: str,
    build: Callable[[], Page],
    brief: Callable[[], Page] | None = None,
    *,
    is_printed: bool = True,
) -> None:
    """Write a result into the output folder, as JSON and as a page, and print it.

    Args:
        options: the options of the command: its output folder, and whether it prints JSON.
        files: the names of the command's files, which it prints: the first is the JSON, and the last may be the page
            (*.html).
        json_text: the result as JSON.
        build: a function that returns the page of the result.
        brief: a function that returns the page that is printed; by default the same.
        is_printed: whether the result is printed, too.
    """
    write_atomically(options.output / files[0], json_text)
    if is_printed and options.as_json:
        print(json_text, flush=True)
    elif is_printed:
        show_page((brief or build)())
    # It comes last, so that an error in it loses nothing.
    if files[-1].endswith(".html"):
        pages.write(options.output / files[-1], build(), command_line())
    if not options.as_json:
        print(f"wrote {', '.join(files)} in {options.output}")


def show_table(shown: DataTable) -> None:
    """Print a table, whose cells are broken between words alone: a part of a number reads like a number."""
    table = new_table(*shown.columns, title=escape(shown.title))
    for column, below in zip(table.columns, zip(*shown.cells, strict=True), strict=False):
        words = " ".join(f"{cell.text} {cell.note}" for cell in below).split()
        column.min_width = max(map(len, words), default=0)
        style = below[0].style
        if style == "text" or column is table.columns[0]:
            column.max_width = WIDEST_TEXT
        elif style in ("", "winner", "tied"):  # a number
            column.justify = "right"
    for row in shown.cells:
        texts = []
        for cell in row:
            sign, style = LOOKS.get(cell.style, ("", ""))
            texts.append(Text(sign + cell.text, style=style))
            if cell.note:
                texts[-1].append(f"\n{cell.note}", style="dim")
        table.add_row(*texts)
    show(table)


@contextlib.contextmanager
def resumable(saved: Path) -> Iterator[None]:
    """If the user interrupts the ``with`` block, print where finished work is, and how to continue.

    Args:
        saved: the file or folder of the finished work; nothing is printed if it does not exist.
    """
    try:
        yield
    except KeyboardInterrupt:
        if saved.exists():
            print(f"Finished work is saved in {saved}: the same command continues from there.", file=sys.stderr)
        raise
