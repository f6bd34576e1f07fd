"""One defect that `mutations.py` plants."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Mutation(NamedTuple):
    """A defect.

    Attributes:
        name: says what is wrong.
        file: that is changed, from the root of the project.
        old: the text that is replaced, which occurs once.
        new: what takes its place.
        why: the program does the same with it, and why; empty where it does not.
    """

    name: str
    file: str
    old: str
    new: str
    why: str = ""

    @property
    def folder(self) -> str:
        """The folder of the package, and of the tests, that it belongs to."""
        return Path(self.file).parts[1]
