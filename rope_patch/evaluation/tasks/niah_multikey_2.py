"""A number that belongs to a word, among as many other words with numbers as the prompt has room for."""

from rope_patch.evaluation.tasks.base import CrowdedTask, endless_pairs


class NiahMultikey2(CrowdedTask, name="niah_multikey_2"):
    """One number of seven digits for each pair of an adjective and a noun."""

    source = (
        "Hsieh et al. (2024), RULER, arXiv:2404.06654, multi-key NIAH 2; our sentences and lists of words (139 "
        "adjectives and 72 nouns, where RULER has thousands), needles at stated depths"
    )
    opening = "Some words have a magic number."
    needle = " The magic number of {name} is {value}."
    question = " What is the magic number of {name}?"
    answer_prefix = " The magic number of {name} is"
    digits = 7
    endless_names = staticmethod(endless_pairs)
