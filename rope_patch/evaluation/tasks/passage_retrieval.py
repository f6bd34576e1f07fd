"""The number of the passage that some words are quoted from."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rope_patch.evaluation.haystack import Haystack
from rope_patch.evaluation.tasks.base import CrowdedTask, Draw, Question

PASSAGE_WORDS, QUOTE_WORDS = 40, 10
"""Length of a passage, and of the quotation from it [words]."""


class PassageRetrieval(CrowdedTask, name="passage_retrieval"):
    """Numbered passages of the haystack in random order, and a quotation from one of them."""

    source = (
        "Bai et al. (2024), LongBench, arXiv:2308.14508, passage retrieval, and the place of Hsieh et al. (2024), "
        "RULER, arXiv:2404.06654, question answering; ours quotes ten words where LongBench gives a summary, has "
        "passages of forty words of the haystack, and numbers in no order"
    )
    opening = "These are passages of a text."
    needle = "\n\nPassage {value}: {name}"
    closing = "\n\nThese were the passages."
    question = "{name}"
    answer_prefix = " It is from passage"
    digits = 5

    def questions(self, depths: Sequence[float], draw: Draw) -> list[Question]:
        """Return a question for each depth."""
        # The whole haystack is searched, because any of its passages may be in the prompt.
        whole, questions = one_line(draw.haystack), super().questions(depths, draw)
        quotes = [quote_of(question.text, whole, draw.rng) for question in questions]
        texts = [f' Which passage has these words in it: "{quote}"?' for quote in quotes]
        return [replace(question, text=text) for question, text in zip(questions, texts, strict=True)]

    def values_and_names(self, count: int, draw: Draw) -> tuple[list[str], list[str]]:
        """Return numbers, and passages with some words that no other part of the text has.

        Raises:
            ValueError: the haystack repeats itself, or has too few such passages.
        """
        if draw.haystack.endless:
            raise ValueError(
                f"{self.name} asks for passages of a text, and the haystack {draw.haystack.name!r} repeats a few "
                "sentences: choose haystack='builtin' (--haystack builtin), or a text of your own"
            )
        whole = one_line(draw.haystack)
        clear = (text for text in shuffled_passages(draw) if quote_of(text, whole, draw.rng))
        chosen = list(itertools.islice(clear, count))
        if len(chosen) < count:
            raise ValueError(
                f"the haystack has {len(chosen)} passages of {PASSAGE_WORDS} words with a part that stands nowhere "
                f"else, {count} are needed: give a longer one"
            )
        return draw.numbers(count, self.digits), chosen

    def others(self, draw: Draw) -> Iterator[tuple[str, str]]:
        """Yield other passages."""
        passages = shuffled_passages(draw)
        numbers = draw.rng.sample(range(10 ** (self.digits - 1), 10**self.digits), len(passages))
        yield from ((text, str(number)) for text, number in zip(passages, numbers, strict=True))


def one_line(haystack: Haystack) -> str:
    """Return the text of a haystack with a single space between its words."""
    return " ".join(haystack.text.split())


def shuffled_passages(draw: Draw) -> list[str]:
    """Return the passages of a haystack in random order."""
    words = draw.haystack.text.split()
    passages = [" ".join(words[i : i + PASSAGE_WORDS]) for i in range(0, len(words) - PASSAGE_WORDS + 1, PASSAGE_WORDS)]
    return draw.rng.sample(passages, len(passages))


def quote_of(passage: str, whole: str, rng: random.Random) -> str:
    """Return words of a passage that stand in the whole text only once; "" if none are found.

    Args:
        passage: passage that is quoted.
        whole: whole text, in one line.
        rng: source of randomness for the place of the quotation.
    """
    words = passage.split()
    # Four places are tried: each takes a search of the whole text.
    for start in rng.sample(range(PASSAGE_WORDS - QUOTE_WORDS + 1), 4):
        quote = " ".join(words[start : start + QUOTE_WORDS])
        if whole.count(quote) == 1:
            return quote
    return ""
