"""Several words with a number each, asked for together."""

from collections.abc import Sequence

from rope_patch.evaluation.tasks.base import Draw, Question, Task
from rope_patch.runtime.captions import names_text


class MultiQuery(Task, name="multiquery"):
    """Another word with a number of seven digits at every depth; one question asks for all numbers."""

    source = (
        "Hsieh et al. (2024), RULER, arXiv:2404.06654, multi-query NIAH; ours has our wording, nouns as keys, one key "
        "for every depth where RULER has four, and asks for the values in the order of the keys"
    )
    joined = True

    def questions(self, depths: Sequence[float], draw: Draw) -> list[Question]:
        """Return the one question that asks for the numbers of all words."""
        values = draw.numbers(len(depths), 7)
        names = draw.names(len(depths))
        hidden = [
            (depth, f" The magic number of {name} is {value}.")
            for depth, name, value in zip(depths, names, values, strict=True)
        ]
        text = f" What are the magic numbers of {names_text(names)}?"
        return [Question(tuple(hidden), text, " In this order, they are", tuple(values), tuple(depths))]
