"""The blocks that the pages of ``analyze`` and ``kv-check`` are made of: sections, tables, lists, texts.

A block says what it shows, and the page's template in ``assets`` says how: see ``analysis.html.jinja`` and
``kv_check.html.jinja``. Figures are :class:`~rope_patch.reports.comparison.Picture`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rope_patch.reports.comparison import Cell, Picture


class TextCell(NamedTuple):
    """What a table of an analysis shows of one value.

    Attributes:
        text: the value.
        style: ``"left"``, ``"long"`` (a sentence), ``"token"``, ``"tokens"`` (many), ``"strong"`` or ``""`` (a number).
    """

    text: str
    style: str = ""


class AnalysisTable(NamedTuple):
    """A table of an analysis.

    Attributes:
        name: heading above the table.
        caption: how to read the table.
        columns: headings of the columns; the first column names the row.
        rows: the cells of each row.
        folded: whether the table is shown only when the reader opens it.
    """

    name: str
    caption: str
    columns: tuple[str, ...]
    rows: list[list[TextCell]]
    folded: bool = False


class SchemeRow(NamedTuple):
    """A row of a table of quantization schemes.

    Attributes:
        name: first cell of the row.
        cells: the cells behind it.
        kind: ``"mitigation"``, ``"first"`` of a group, or "".
    """

    name: str
    cells: list[Cell]
    kind: str = ""


class SchemeTable(NamedTuple):
    """A table of quantization schemes.

    Attributes:
        name: heading above the table; "" where the heading of the section says it.
        caption: how to read the table.
        columns: headings of the columns; the first column has the names of the rows.
        lines: the rows.
    """

    name: str
    caption: str
    columns: tuple[str, ...]
    lines: list[SchemeRow]


class TokenLines(NamedTuple):
    """A text, token by token.

    Attributes:
        title: heading above the text.
        lines: for each line, the position of its first token and its tokens.
    """

    title: str
    lines: list[tuple[int, list[str]]]


Block = str | Picture | AnalysisTable | SchemeTable | TokenLines
"""A paragraph, a figure, a table or a text."""


class Section(NamedTuple):
    """A section of a page.

    Attributes:
        name: id of the section in links.
        heading: its heading.
        blocks: its contents in order.
    """

    name: str
    heading: str
    blocks: Sequence[Block]
