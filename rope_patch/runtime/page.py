"""The one model of every result that is shown: a page of sections, of tables, figures and notes.

A builder (``comparison``, ``kv``, ``analysis``) turns a result into a :class:`Page`. The template
``assets/page.html.jinja`` turns a page into one HTML file that needs no script, no font and no network;
``rope_patch.cli.printing.show_page`` prints it; :func:`markdown_table` writes a table of it into a model card.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rope_patch.runtime.folders import write_atomically
from rope_patch.runtime.packaged import data_path

INTERVALS = "How intervals are made: docs/measure.md, “How sure a difference is”."
_LONGEST_NAME = 80  # what has more characters is cut in tables, figures and names of files


@dataclass(frozen=True)
class Cell:
    """What a table shows of one value.

    Attributes:
        text: the value, as text.
        note: a second line in small type, for example an interval; "" for none.
        style: the look of the cell: ``"winner"``, ``"tied"`` (not significantly different from the best), ``"safe"``,
            ``"undecided"``, ``"unsafe"``, ``"left"`` (on one line), ``"text"`` (on several lines),
            ``"token"`` (with its white space) or ``""`` for a number.
    """

    text: str
    note: str = ""
    style: str = ""


Cells = list[Cell | str]
"""Cells of a table; a plain string is a number without a note."""


@dataclass(frozen=True)
class DataTable:
    """A table; its first column names the rows.

    Attributes:
        title: the heading above the table.
        columns: the headings of the columns.
        rows: the cells of each row.
        caption: a caption that says how to read the table, in one or two sentences.
        folded: whether the table is closed until the reader opens it by its title.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Cells]
    caption: str
    folded: bool = False

    @property
    def cells(self) -> list[list[Cell]]:
        """The rows, with every string as a cell."""
        return [[Cell(item) if isinstance(item, str) else item for item in row] for row in self.rows]


@dataclass(frozen=True)
class Figure:
    """A figure, which is drawn only where it is shown.

    Attributes:
        draw: a function that returns the figure of matplotlib.
        title: the title, which says what the figure shows.
        caption: a caption that says how to read the figure, and what stands out, in one or two sentences.
    """

    draw: Callable[[], Any]
    title: str
    caption: str

    @cached_property
    def drawn(self) -> Any:
        """The figure of matplotlib, drawn once for the page and its own file."""
        return self.draw()

    @cached_property
    def vector(self) -> str:
        """The figure as SVG."""
        from rope_patch.runtime.plots import svg

        return svg(self.drawn)

    @cached_property
    def source(self) -> str:
        """The figure as a self-contained image, as a ``data:`` address."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.vector.encode()).decode()}"


@dataclass(frozen=True)
class Note:
    """A paragraph."""

    text: str


Part = DataTable | Figure | Note


@dataclass(frozen=True)
class Section:
    """A section of a page.

    Attributes:
        title: the heading of the section.
        answer: the answer that the section gives, in sentences; the first one stands out.
        parts: the evidence, in order.
    """

    title: str
    answer: Sequence[str]
    parts: Sequence[Part]


@dataclass(frozen=True)
class Page:
    """A report.

    Attributes:
        title: the title of the document.
        sections: the sections, in order.
    """

    title: str
    sections: Sequence[Section]


def render(page: Page, command: str | None = None) -> str:
    """Return a page as one HTML document: everything is escaped, and the same page gives the same text.

    Args:
        page: the page to show.
        command: the command line that made the page; None shows none.
    """
    # StrictUndefined: a misspelt name in the template raises, instead of leaving a gap.
    environment = Environment(
        loader=FileSystemLoader(data_path("assets")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    # The template asks of each part which kind it is.
    environment.tests["instance"] = lambda part, name: type(part).__name__ == name
    return environment.get_template("page.html.jinja").render(page=page, command=command)


def write(path: str | Path, page: Page, command: str | None = None) -> None:
    """Write what :func:`render` returns to a file, whole or not at all, and its figures to a folder beside it.

    Each figure is written as PNG and as SVG.

    The folder is called like the file, ``report-figures`` for ``report.html``; figures of an earlier page go.

    Raises:
        OSError: the folder cannot be written.
    """
    path = Path(path)
    write_atomically(path, render(page, command))
    folder = path.with_name(f"{path.stem}-figures")
    for earlier in folder.glob("[0-9][0-9]-*.*"):
        earlier.unlink()
    figures = [part for section in page.sections for part in section.parts if isinstance(part, Figure)]
    for number, shown in enumerate(figures, 1):
        folder.mkdir(exist_ok=True)
        words = "-".join(re.findall(r"\w+", shown.title.lower()))
        name = f"{number:02}-{words[:_LONGEST_NAME]}"
        shown.drawn.savefig(folder / f"{name}.png", dpi=150)
        (folder / f"{name}.svg").write_text(shown.vector, encoding="utf-8")


def figure(draw: Callable[..., Any], *data: Any, title: str, caption: str, **options: Any) -> Figure:
    """Return a figure that a function of ``rope_patch.reports.plots`` draws of some data, under a title."""
    return Figure(partial(draw, *data, title=title, **options), title, caption)


def markdown_table(table: DataTable) -> str:
    """Return a table in Markdown, with the notes of its cells in brackets."""
    lines = [list(table.columns), ["---", *["---:"] * (len(table.columns) - 1)]]
    lines += [[f"{cell.text} ({cell.note})" if cell.note else cell.text for cell in row] for row in table.cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def facts(entries: Sequence[tuple[str, str]], environment: Mapping[str, str]) -> DataTable:
    """Return what was measured, on what and with what versions of programs, as a folded table."""
    versions = ", ".join(f"{name} {value}" for name, value in environment.items()) or "not recorded"
    rows: list[Cells] = [[name, Cell(value, style="text")] for name, value in (*entries, ("Environment", versions))]
    return DataTable("What was measured", ["", "Value"], rows, "The model, the texts and the versions.", folded=True)


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return for each name one that fits a table: a very long one is cut, and numbered, so that no two are equal."""
    short = {}
    for number, name in enumerate(names, 1):
        short[name] = name
        if len(name) > _LONGEST_NAME:
            short[name] = f"{name[:_LONGEST_NAME]}… (number {number})"
    return short


def _breakable(name: str) -> list[str]:
    """A method string or a cache format in pieces between which a line may break."""
    return re.findall(r"[^+:/;]*[+:/;]|[^+:/;]+", name)
