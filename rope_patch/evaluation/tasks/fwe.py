"""The most frequent words of a text of coded words."""

import itertools
import math
import random
import string
from collections.abc import Iterator, Sequence

from rope_patch.evaluation.tasks.base import Draw, Question, Task, in_order

FREQUENT_WORDS = 3
"""Number of words that are asked for."""


class FrequentWords(Task, name="fwe"):
    """Words of six random letters in random order, the k-th as frequent as 1/k² says; the first word is dots."""

    source = (
        "Hsieh et al. (2024), RULER, arXiv:2404.06654, frequent words extraction, exponent 2, a vocabulary of one "
        "word per 50 tokens of the prompt and its answer, as lm-eval has it (NVIDIA's own code leaves the answer's 50 "
        "tokens out of the count); ours has our wording, asks for the most frequent word first, and lets no two of the "
        "words asked for be equally frequent"
    )
    joined, placed, anywhere = True, False, True

    def questions(self, depths: Sequence[float], draw: Draw) -> list[Question]:
        """Return the one question that asks for the most frequent words; the depths change nothing."""
        frequent = tuple(draw.of_common_length(coded_words, FREQUENT_WORDS))
        others = (word for word in coded_words(draw.rng) if word not in frequent)
        words = ["...", *frequent, *itertools.islice(others, max(1, draw.length // 50 - FREQUENT_WORDS - 1))]
        seed = draw.rng.random()

        def context(size: int) -> list[str]:
            pieces = [
                f" {word}" for word, count in zip(words, counts(size, len(words)), strict=True) for _ in range(count)
            ]
            # A generator of its own for each call, so that the same size always gives the same text.
            random.Random(seed).shuffle(pieces)
            return pieces

        return [
            Question(
                hidden=(),
                text=f" Apart from the dots, what are the {FREQUENT_WORDS} most frequent words of the coded text?",
                answer_prefix=" The most frequent one first, they are",
                parts=frequent,
                depths=in_order(FREQUENT_WORDS),
                context=context,
                opening="This is a coded text. Some of its words are more frequent than the others.",
                closing=" The coded text ends here.",
            )
        ]


def counts(size: int, words: int) -> list[int]:
    """Return how often each word stands in a text of about ``size`` words, the most frequent word first.

    >>> counts(100, 6), counts(0, 6)
    ([60, 15, 6, 3, 2, 1], [0, 3, 2, 1, 0, 0])
    """
    # The sum of 1/k² over all k is π²/6, so these are shares of the whole, as in lm-eval's fwe_utils.
    table = [int(size * 6 / (math.pi * rank) ** 2) for rank in range(1, words + 1)]
    for i in range(FREQUENT_WORDS, 0, -1):  # no ties among the words asked for and the next one
        table[i] = max(table[i], table[i + 1] + 1)
    return table


def coded_words(rng: random.Random) -> Iterator[str]:
    """Yield words of six random letters, all different."""
    earlier = set[str]()
    while True:
        word = "".join(rng.choices(string.ascii_lowercase, k=6))
        if word not in earlier:
            earlier.add(word)
            yield word
