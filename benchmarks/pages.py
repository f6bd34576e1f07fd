"""What the scripts share that write tables into pages: where results are, marks in a page, and Markdown tables.

A table stands between ``<!-- table NAME WORDS… -->`` and ``<!-- end -->`` and is written anew by a script; tests
compare the page with what the script would write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"<!-- table ([^\n]+?) -->\n.*?<!-- end -->", re.DOTALL)


def results(name: str) -> dict[str, Any]:
    """Return a file of benchmarks/results."""
    report: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return report


def page_with(page: str, table_of: Callable[..., str]) -> str:
    """Return a page with its tables written anew.

    Args:
        page: Markdown.
        table_of: called with the words of each mark; returns what stands below it.
    """

    def filled(match: re.Match[str]) -> str:
        return f"<!-- table {match[1]} -->\n\n{table_of(*match[1].split())}\n\n<!-- end -->"

    return MARK.sub(filled, page)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], rule: str = "---:") -> str:
    """Return a Markdown table; every column but the first is aligned as ``rule`` says."""
    lines = [head, ["---", *[rule] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
