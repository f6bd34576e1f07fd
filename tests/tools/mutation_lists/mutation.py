"""One defect that `mutations.py` plants."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Mutation(NamedTuple):
    """A defect.

    Attributes:
        name: a name that says what is wrong.
        file: the file that is changed, from the root of the project.
        old: the text that is replaced, which occurs once.
        new: the text that takes its place.
        why: the reason if the program does the same with the defect, so that no test can catch it; empty otherwise.
    """

    name: str
    file: str
    old: str
    new: str
    why: str = ""

    @property
    def folder(self) -> str:
        """The folder of the package, and of the tests, that the defect belongs to."""
        return Path(self.file).parts[1]
