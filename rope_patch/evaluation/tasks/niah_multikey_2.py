"""A number that belongs to a word, among as many other words with numbers as the prompt has room for."""

from collections.abc import Iterator

from rope_patch.evaluation.tasks.base import CrowdedTask, Draw, endless_pairs


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

    def values_and_names(self, count: int, draw: Draw) -> tuple[list[str], list[str]]:
        """Return numbers and words."""
        return draw.numbers(count, self.digits), draw.of_common_length(endless_pairs, count)

    def others(self, draw: Draw) -> Iterator[tuple[str, str]]:
        """Yield other words and their numbers."""
        for name in endless_pairs(draw.rng):
            yield name, str(draw.rng.randrange(10 ** (self.digits - 1), 10**self.digits))
