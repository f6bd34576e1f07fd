"""The most common words of a list of words."""

import itertools
from collections.abc import Sequence

from rope_patch.evaluation.tasks.base import Draw, Question, Task, endless_pairs, in_order

COMMON_WORDS = 10
"""Number of words that are asked for."""

LONG_PROMPT = 4096
"""Shortest prompt whose list has a common word 30 times and any other word 3 times; in shorter ones it is 6 times and
once [tokens]."""


class CommonWords(Task, name="cwe"):
    """A numbered list in random order, in which ten words stand more often than the others."""

    source = (
        "Hsieh et al. (2024), RULER, arXiv:2404.06654, common words extraction, with the numbers of repetitions that "
        "lm-eval has; ours has pairs of an adjective and a noun, our wording, no worked example, and asks for the "
        "words in the order of their first appearance"
    )
    joined, placed, anywhere = True, False, True

    def questions(self, depths: Sequence[float], draw: Draw) -> list[Question]:
        """Return the one question that asks for the common words; the depths change nothing."""
        often, seldom = (30, 3) if draw.length >= LONG_PROMPT else (6, 1)
        # Each entry is drawn with a random number and sorted by it, so that adding entries keeps the order of the
        # others.
        entries = [(draw.rng.random(), word) for word in draw.pairs_of_words(COMMON_WORDS) * often]
        common = tuple(dict.fromkeys(word for _, word in sorted(entries)))
        others = (
            (draw.rng.random(), word) for word in endless_pairs(draw.rng) if word not in common for _ in range(seldom)
        )
        rest: list[tuple[float, str]] = []

        def context(size: int) -> list[str]:
            rest.extend(itertools.islice(others, max(0, size - len(rest))))
            return [f" {number}. {word}" for number, (_, word) in enumerate(sorted(entries + rest[:size]), 1)]

        return [
            Question(
                hidden=(),
                text=f" What are the {COMMON_WORDS} most common words of the list?",
                answer_prefix=" In the order of their first appearance, they are",
                parts=common,
                depths=in_order(COMMON_WORDS),
                context=context,
                opening="This is a numbered list of words. Some of them stand in it more often than the others.",
                closing=" The list ends here.",
            )
        ]
