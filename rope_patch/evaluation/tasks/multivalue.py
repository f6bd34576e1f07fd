"""Several numbers that belong to one word, asked for together."""

from collections.abc import Sequence

from rope_patch.evaluation.tasks.base import Draw, Question, Task


class MultiValue(Task, name="multivalue"):
    """One word that has a number of seven digits at every depth; one question asks for all numbers."""

    source = (
        "Hsieh et al. (2024), RULER, arXiv:2404.06654, multi-value NIAH; ours has our wording, a noun as the key, a "
        "value at every depth where RULER has four values, and asks for them in their order"
    )
    joined = True

    def questions(self, depths: Sequence[float], draw: Draw) -> list[Question]:
        """Return the one question that asks for all numbers."""
        values = draw.numbers(len(depths), 7)
        (name,) = draw.names(1)
        needles = [f" One magic number of {name} is {value}." for value in values]
        text = f" What are all the magic numbers of {name}?"
        prefix = f" In order, the magic numbers of {name} are"
        return [Question(tuple(zip(depths, needles, strict=True)), text, prefix, tuple(values), tuple(depths))]
