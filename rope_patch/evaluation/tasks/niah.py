"""A needle in a haystack: a number that belongs to a word."""

from rope_patch.evaluation.tasks.base import NeedleTask


class Niah(NeedleTask, name="niah"):
    """One number of seven digits for each word."""

    source = (
        "Hsieh et al. (2024), RULER, arXiv:2404.06654, single NIAH 1 and 2 (by haystack); ours has our wording, nouns "
        "as keys where RULER has pairs of an adjective and a noun, and a needle at a stated depth where RULER draws "
        "one; the answer has to begin with the number, where RULER finds it anywhere in 128 tokens"
    )
    needle = " The magic number of {name} is {value}."
    question = " What is the magic number of {name}?"
    answer_prefix = " The magic number of {name} is"
    digits = 7
