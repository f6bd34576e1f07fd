"""RULER's eleven generated tasks: its sentences, counts and scorer, at the exact length and with needles by depth.

*Source*: Hsieh et al. (2024), arXiv:2404.06654; the sentences are those of its code (NVIDIA/RULER, Apache-2.0), as
lm-eval 0.4.13 has them. Its two tasks of questions about paragraphs take a file of the user's (``qa.py``).
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
import string
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from rope_patch.evaluation.tasks.base import Draw, Question, Task, drawn_once, endless_pairs, endless_uuids
from rope_patch.texts.builtin_text import builtin_text

SUITE = "ruler"
SOURCE = (
    "Hsieh et al. (2024), RULER, arXiv:2404.06654, with the sentences, counts and scorer of lm-eval 0.4.13; the prompt "
    "with all tokens that are generated has the exact length; "
)
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
WHOLE = (0.0, 1.0)
"""The depths of the parts of an answer that is asked for as a whole: their places in it."""
SHORT = 4096
"""Length below which RULER repeats the words of ``cwe`` less often [tokens]."""


def spread(depths: Sequence[float], count: int) -> list[float]:
    """Return depths from the first to the last of those that are stated, evenly.

    >>> spread([0.0, 0.2, 1.0], 5)
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    low, high = depths[0], depths[-1]
    return [low + (high - low) * place / (count - 1) for place in range(count)]


# --- needles ---------------------------------------------------------------------------------------------------------


class Needles(Task):
    """Sentences that give a key a magic value, in a text that has nothing to do with them.

    Attributes:
        value: the word for a value: ``"number"`` or ``"uuid"``.
        keys: the number of keys of a prompt: all but one are asked by nobody.
        line: the text before each sentence.
    """

    source = SOURCE + (
        "needles stand at stated depths; keys are pairs of 139 adjectives and 72 nouns; UUIDs begin with a digit; the "
        "essays are the built-in text, or yours"
    )
    suite = SUITE
    anywhere = True
    generated = 128
    essay = True
    value: ClassVar[str] = "number"
    keys: ClassVar[int] = 1
    line: ClassVar[str] = " "
    endless_keys: ClassVar[staticmethod[[random.Random], Iterator[str]]] = staticmethod(endless_pairs)

    def needle(self, key: str, value: str) -> str:
        """Return the sentence that gives a key its value."""
        return f"{self.line}One of the special magic {self.value}s for {key} is: {value}."

    def values(self, count: int, draw: Draw) -> list[str]:
        """Return different values, equally long in tokens."""
        if self.value == "uuid":
            return draw.of_common_length(endless_uuids, count)
        return draw.numbers(count, 7)

    def context(self, asked: Sequence[str], draw: Draw) -> Callable[[int], Sequence[str]] | None:
        """Return the text around needles as pieces; None for the haystack.

        Args:
            asked: keys and values that must not stand in it.
            draw: the source of keys and values.
        """
        return None

    def questions(self, depths: Sequence[float], draw: Draw) -> list[Question]:
        """Return a question for each depth; needles that nobody asks for stand at random places, the same for all."""
        count = len(depths) + self.keys - 1
        values = self.values(count, draw)
        keys = draw.of_common_length(self.endless_keys, count)
        needles = [self.needle(key, value) for key, value in zip(keys, values, strict=True)]
        extra = [(draw.rng.random(), needle) for needle in needles[len(depths) :]]
        context = self.context([*keys, *values], draw)
        return [
            self.question([*extra, (depth, needle)], key, [value], [depth], context)
            for depth, key, value, needle in zip(depths, keys, values, needles, strict=False)
        ]

    def question(
        self,
        hidden: Sequence[tuple[float, str]],
        query: str,
        values: Sequence[str],
        depths: Sequence[float],
        context: Callable[[int], Sequence[str]] | None = None,
    ) -> Question:
        """Return the question that asks for the values of keys, in RULER's words."""
        some, verb, all_of, kind = "A", "is", "", self.value
        if len(values) > 1:
            some, verb, all_of, kind = "Some", "are", " all", f"{self.value}s"
        return Question(
            hidden=tuple(sorted(hidden)),
            text=f"\nWhat {verb}{all_of} the special magic {kind} for {query} mentioned in the provided text?",
            answer_prefix=f" The special magic {kind} for {query} mentioned in the provided text {verb}",
            parts=tuple(values),
            depths=tuple(depths),
            context=context,
            opening=(
                f"{some} special magic {kind} {verb} hidden within the following text. Make sure to memorize it. I "
                f"will quiz you about the {kind} afterwards.\n"
            ),
            between_sentences=context is None,
        )


class Single1(Needles, name="niah_single_1"):
    """One number of seven digits for a pair of words, in sentences that repeat."""

    essay = False
    line = "\n"

    def context(self, asked: Sequence[str], draw: Draw) -> Callable[[int], Sequence[str]]:
        """Return RULER's noise, a line each."""
        return lambda size: [f"\n{NOISE}"] * size


class Single2(Needles, name="niah_single_2"):
    """One number of seven digits for a pair of words, in a text."""


class Single3(Needles, name="niah_single_3"):
    """One UUID for a pair of words, in a text."""

    value = "uuid"


class Multikey1(Needles, name="niah_multikey_1"):
    """One number of seven digits for a pair of words, in a text with those of three other pairs."""

    keys = 4


class Multikey2(Needles, name="niah_multikey_2"):
    """One number of seven digits for a pair of words, among as many others as the prompt has room for."""

    line = "\n"

    def context(self, asked: Sequence[str], draw: Draw) -> Callable[[int], Sequence[str]]:
        """Return needles of other keys."""

        def others() -> Iterator[str]:
            numbers = (draw.number(7) for _ in itertools.count())
            values = endless_uuids(draw.rng) if self.value == "uuid" else numbers
            for key, value in zip(self.endless_keys(draw.rng), values, strict=False):
                if key not in asked and value not in asked:
                    yield self.needle(key, value)

        return drawn_once(others())


class Multikey3(Multikey2, name="niah_multikey_3"):
    """One UUID for a UUID, among as many others as the prompt has room for."""

    value = "uuid"
    endless_keys = staticmethod(endless_uuids)


class Multivalue(Needles, name="niah_multivalue"):
    """Four numbers for one pair of words, asked for together."""

    joined = True

    def questions(self, depths: Sequence[float], draw: Draw) -> list[Question]:
        """Return the one question that asks for all values."""
        values = self.values(4, draw)
        (key,) = draw.of_common_length(self.endless_keys, 1)
        places = spread(depths, 4)
        hidden = [(depth, self.needle(key, value)) for depth, value in zip(places, values, strict=True)]
        return [self.question(hidden, key, values, spread(WHOLE, 4))]


class Multiquery(Needles, name="niah_multiquery"):
    """A number for each of four pairs of words, asked for together."""

    joined = True

    def questions(self, depths: Sequence[float], draw: Draw) -> list[Question]:
        """Return the one question that asks for the values of all keys."""
        values = self.values(4, draw)
        keys = draw.of_common_length(self.endless_keys, 4)
        places = spread(depths, 4)
        needles = [self.needle(key, value) for key, value in zip(keys, values, strict=True)]
        query = ", ".join(keys[:-1]) + f", and {keys[-1]}"
        return [self.question(list(zip(places, needles, strict=True)), query, values, spread(WHOLE, 4))]


# --- variables and words ---------------------------------------------------------------------------------------------


class VariableTracking(Task, name="vt"):
    """A chain of five variables that all have one value, after a worked example; the question is which they are."""

    source = SOURCE + "assignments stand at stated depths; the example has ten lines of noise"
    suite = SUITE
    joined = anywhere = True
    generated = 30

    def questions(self, depths: Sequence[float], draw: Draw) -> list[Question]:
        """Return the one question that asks for all variables of the chain."""
        example = self.chain(3, spread(WHOLE, 5), draw)
        lines = [f" {NOISE}\n"] * 10
        for place, (_, link) in enumerate(example.hidden):
            lines.insert(3 * place, link)
        worked = example.opening + "".join(lines).lstrip() + example.text + example.answer_prefix + example.target
        return [self.chain(5, spread(depths, 5), draw, worked + "\n\n\n\n")]

    def chain(self, letters: int, depths: Sequence[float], draw: Draw, before: str = "") -> Question:
        """Return a question about a chain of variables with names of so many letters.

        Args:
            letters: the number of letters of a name.
            depths: the depths of the assignments.
            draw: the source of names and of the value.
            before: the text before the question.
        """
        # More than needed, because some repeat and some have another number of tokens.
        pool = ["".join(draw.rng.choices(string.ascii_uppercase, k=letters)) for _ in range(64)]
        names = draw.equally_long(list(dict.fromkeys(pool)), len(depths))
        value = draw.numbers(1, 5)[0]
        links = [f" VAR {names[0]} = {value}"]
        links += [f" VAR {name} = VAR {last} " for last, name in itertools.pairwise(names)]
        return Question(
            hidden=tuple(zip(depths, links, strict=True)),
            text=f"\nQuestion: Find all variables that are assigned the value {value} in the text above.",
            answer_prefix=(
                " Answer: According to the chain(s) of variable assignment in the text above, "
                f"{len(names)} variables are assgined the value {value}, they are:"  # RULER's spelling
            ),
            parts=tuple(names),
            depths=tuple(spread(WHOLE, len(names))),
            context=lambda size: [f" {NOISE}\n"] * size,
            opening=(
                before + "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
            ),
            separator=" ",
        )


@functools.cache
def words() -> list[str]:
    """Return the words of the built-in text that are written in small letters, in alphabetical order."""
    text = builtin_text("haystack").text
    return sorted(set(re.findall(r"(?<![\w'-])[a-z]{3,12}(?![\w'-])", text)))


class CommonWords(Task, name="cwe"):
    """A numbered list in which ten words stand ten times as often as others; the question is which they are."""

    source = SOURCE + "the words are those of the built-in text, and a list that ends too early is filled up by text"
    suite = SUITE
    joined = anywhere = True
    generated = 120

    def questions(self, depths: Sequence[float], draw: Draw) -> list[Question]:
        """Return the one question that asks for the ten words; the list has no depths."""
        pool = draw.rng.sample(words(), len(words()))
        common, uncommon = pool[:10], pool[10:]
        often, seldom = (30, 3) if draw.length >= SHORT else (6, 1)
        seed = draw.rng.random()

        def context(size: int) -> list[str]:
            listed = often * common + seldom * uncommon[:size]
            random.Random(seed).shuffle(listed)
            return [f" {number}. {word}" for number, word in enumerate(listed, 1)]

        question = Question(
            hidden=(),
            text="\nQuestion: What are the 10 most common words in the above list?",
            answer_prefix=" Answer: The top 10 words that appear most often in the list are:",
            parts=tuple(common),
            depths=tuple(spread(WHOLE, 10)),
            context=context,
            opening=(
                "Below is a numbered list of words. In these words, some appear more often than others. Memorize the "
                "ones that appear most often.\n"
            ),
            separator=" ",
            numbered=True,
        )
        return [question]


class FrequentWords(Task, name="fwe"):
    """Coded words whose frequencies fall with the square of their rank; the question is which three lead."""

    source = SOURCE + "a text that ends too early is filled up by words of the haystack"
    suite = SUITE
    joined = anywhere = True
    generated = 50

    def questions(self, depths: Sequence[float], draw: Draw) -> list[Question]:
        """Return the one question that asks for the three words; they have no depths."""
        different = max(8, draw.length // 50)
        coded = dict[str, None]()
        while len(coded) < different:
            coded["".join(draw.rng.choices(string.ascii_lowercase, k=6))] = None
        ranked = ["...", *list(coded)[1:]]
        seed = draw.rng.random()

        def context(size: int) -> list[str]:
            # Zipf's law with exponent 2, whose weights add up to pi**2 / 6; with fewer words, ranks would be equal.
            counts = (math.floor((size + 100) / rank**2 / (math.pi**2 / 6)) for rank in itertools.count(1))
            text = [f" {word}" for word, count in zip(ranked, counts, strict=False) for _ in range(count)]
            random.Random(seed).shuffle(text)
            return text

        question = Question(
            hidden=(),
            text=(
                "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
                "frequently appeared words in the above coded text?"
            ),
            answer_prefix=(" Answer: According to the coded text above, the three most frequently appeared words are:"),
            parts=tuple(ranked[1:4]),
            depths=tuple(spread(WHOLE, 3)),
            context=context,
            opening=(
                "Read the following coded text and track the frequency of each coded word. Find the three most "
                "frequently appeared coded words. "
            ),
        )
        return [question]
