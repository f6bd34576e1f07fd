"""Variables that take their value from one another, in a chain through the text."""

import itertools
import string
from collections.abc import Sequence

from rope_patch.evaluation.tasks.base import Draw, Question, Task


class VariableTracking(Task, name="vt"):
    """A chain of variables that all have the value of a number, with one assignment at every depth."""

    source = (
        "Hsieh et al. (2024), RULER, arXiv:2404.06654, variable tracking, one chain; ours has our wording, no worked "
        "example, names of three letters where RULER has five, an assignment at every depth where RULER has five, and "
        "asks for the names in their order"
    )
    joined = anywhere = True

    def questions(self, depths: Sequence[float], draw: Draw) -> list[Question]:
        """Return the one question that asks for all variables of the chain."""
        value = draw.numbers(len(depths), 5)[0]
        # More than needed, because some repeat and some have another number of tokens.
        pool = ["".join(draw.rng.sample(string.ascii_uppercase, 3)) for _ in range(64 + len(depths))]
        names = draw.equally_long(list(dict.fromkeys(pool)), len(depths))
        links = [f" VAR {names[0]} = {value}."]
        links += [f" VAR {name} = VAR {before}." for before, name in itertools.pairwise(names)]
        text = f" Which {len(names)} variables have the value {value}?"
        hidden = tuple(zip(depths, links, strict=True))
        return [Question(hidden, text, " In order, they are", tuple(names), tuple(depths))]
