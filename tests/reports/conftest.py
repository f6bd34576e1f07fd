"""Figures of reports, seen but not saved."""

import pytest

from rope_patch.reports.plots import base


@pytest.fixture
def figures(monkeypatch):
    """Figures as they would have been saved, which is left out: it takes most of the time of a page."""
    drawn = []
    monkeypatch.setattr(base, "svg", lambda figure: drawn.append(figure) or "<svg></svg>")
    return drawn
