"""A needle in a haystack: a number that belongs to a word."""

from rope_patch.evaluation.tasks.base import NeedleTask


class Niah(NeedleTask, name="niah"):
    """One number of seven digits for each word."""

    source = "Hsieh et al. (2024), RULER, arXiv:2404.06654, NIAH; ours hides one key per needle and no distractors"
    needle = " The magic number of {name} is {value}."
    question = " What is the magic number of {name}?"
    answer_prefix = " The magic number of {name} is"
    digits = 7
