"""Scores by hand for reports, and a parser that reads their pages."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser

import torch

from rope_patch.evaluation.compare import Row
from rope_patch.evaluation.retrieval.measure import RetrievalCell, RetrievalResult
from rope_patch.tables import RotaryTable
from support.evaluated import answered, perplexity_of, result_of

VOID = {"meta", "link", "img", "br", "wbr", "hr", "input"}

LENGTHS = (4, 8)
DEPTHS = (0.0, 0.5, 1.0)


def row(method, losses, hits=None, *, lengths=LENGTHS, table=(1.0, 0.1)):
    """A row of a comparison.

    Args:
        method: the method string.
        losses: a loss for each window, the same at all positions [nats/token].
        hits: how many of 6 samples are right at each (length, depth); all of them by default.
        lengths: the lengths that are measured [tokens].
        table: the frequencies of its table [rad/token].
    """
    score = perplexity_of([[loss] * len(lengths) for loss in losses], (0, *lengths))
    cells = tuple(
        RetrievalCell(
            length,
            depth,
            tuple(
                answered("12", "12", right, -1.5 if right else -9.0)
                for right in (i < (hits or {}).get((length, depth), 6) for i in range(6))
            ),
        )
        for length in lengths
        for depth in DEPTHS
    )
    retrieval_result = RetrievalResult("passkey", cells, 7, "noise", "cd" * 32, (0, 5))
    tables = (RotaryTable(torch.tensor(table), 1.0, 1e4, "default", 4),)
    return Row(method, result_of(score, retrieval_result, seed=7), tables)


class Page(HTMLParser):
    """A parsed page, whose tags are checked to nest.

    Attributes:
        open: the tags that are open at the present place; empty at the end.
        tags: every tag with its attributes, in order.
        text: the pieces of text, without those of styles.
        rows: the rows of all tables; each is a list of the class and text of its cells.
        tables: the rows of each table, by its name.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.rows: list[list[tuple[str, str]]] = []
        self.tables: dict[str, list[list[tuple[str, str]]]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if attrs and dict(attrs).get("role") == "region":
            self.tables[dict(attrs)["aria-label"]] = []
        if tag == "tr":
            self.rows.append([])
            list(self.tables.values())[-1].append(self.rows[-1])
        if tag in ("td", "th"):
            self.rows[-1].append((dict(attrs).get("class") or "", ""))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)
        if {"td", "th"} & set(self.open):
            kind, text = self.rows[-1][-1]
            self.rows[-1][-1] = kind, text + data

    def table(self, name):
        """The rows of a table as lists of texts, its head first."""
        return [[text.strip() for _, text in cells] for cells in self.tables[name]]

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]

    def row(self, method):
        """The first row whose first cell is that method."""
        return next(cells for cells in self.rows if cells[0][1].strip() == method)


def accessible(text: str) -> None:
    """Check that a page suits keyboards and screen readers: order of headings, names of tables, figures and regions."""
    page = Page(text)
    levels = [int(tag[1]) for tag, _ in page.tags if tag in ("h1", "h2", "h3", "h4")]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels)), "no level is left out"
    assert page.all("html") == [{"lang": "en"}] and len(page.all("main")) == 1
    assert all(len(image["alt"] or "") > 40 for image in page.all("img"))
    assert len(page.all("caption")) == len(page.all("table"))
    assert all(head.get("scope") in ("col", "row", "colgroup") for head in page.all("th"))
    scrolled = [given for _, given in page.tags if given.get("role") == "region"]
    assert all(given["aria-label"] and given["tabindex"] == "0" for given in scrolled)
    ids = [given["id"] for _, given in page.tags if "id" in given]
    assert len(ids) == len(set(ids))
    links = [link["href"] or "" for link in page.all("a")]
    assert {link.removeprefix("#") for link in links} <= set(ids), "every link points into the page"


def loads_nothing(text: str) -> None:
    """Check that a page is a single file: its images are within it, and it has no script and no address outside."""
    page = Page(text)
    for image in page.all("img"):
        assert (image["src"] or "").startswith("data:image/svg+xml;base64,")
    for _, attributes in page.tags:
        for name in ("src", "href", "srcset", "action", "data", "background"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))
    assert not page.all("script") and not page.all("link")
    assert not re.search(r"url\(|@import", text) and "default-src 'none'" in text
