"""Figures of reports, seen but not saved."""

import pytest
from matplotlib.figure import Figure

from rope_patch.reports.plots import base


@pytest.fixture
def figures(monkeypatch):
    """Figures as they would have been saved, which is left out: it takes most of the time of a page.

    Where they are saved as PNG they are laid out all the same, since what does not fit raises a warning there.
    """
    drawn = []
    monkeypatch.setattr(base, "svg", lambda figure: drawn.append(figure) or "<svg></svg>")
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figure.draw_without_rendering())
    return drawn
