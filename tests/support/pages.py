"""The code that stands on a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return the blocks of a page, each as its language and its text."""
    return re.findall(r"```(\w+)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def contributed(mark: str) -> str:
    """Return the Python block of docs/your-own.md that holds a mark; without the page the test is skipped."""
    page = ROOT / "docs" / "your-own.md"
    if not page.is_file():
        pytest.skip("not in the source distribution", allow_module_level=True)
    (code,) = [text for kind, text in blocks(page) if kind == "python" and mark in text]
    return code
