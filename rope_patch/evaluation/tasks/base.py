"""Base classes of retrieval tasks: they hide something in a text, ask about it, and tell whether an answer is right."""

from __future__ import annotations

import functools
import itertools
import random
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rope_patch.registry import Registry

NOUNS = """
    apple bird bridge candle castle cloud copper dragon eagle engine falcon feather forest garden ginger hammer
    harbor helmet island jacket kettle ladder lemon lion magnet maple marble meadow mirror mountain needle ocean
    olive orange otter paper pearl pepper pillow pirate planet pocket pumpkin puzzle rabbit ribbon river rocket
    saddle silver spider sugar table temple thunder tiger tomato tower tunnel turtle valley velvet violin wagon
    walnut whale willow window winter wizard yellow zebra
"""
"""Nouns that needles are named with."""

ADJECTIVES = """
    ancient angry autumn bitter brave bright broad broken bronze busy calm careful cheap cheerful clean clear clever
    cold common cool crooked curious daily damp dark deep distant dry dusty eager early easy empty faint famous fancy
    fast fierce flat fresh friendly frozen gentle giant golden grand grateful great green grey happy hard heavy hidden
    hollow honest huge humble hungry icy jolly kind large late lazy light little lively lonely long loud lucky mild
    modern muddy narrow native neat new noble noisy odd old open pale patient plain polite proud purple quick quiet
    rapid rare red rich ripe rough round royal rusty sacred safe salty shallow sharp shiny short shy silent simple slow
    small smooth soft solid sour steady steep strange strong sunny sweet swift tall tender thick thin tiny tired warm
    weak wet white wide wild wise wooden young
"""
"""Adjectives of keys and words of two parts, such as ``quiet-river``."""

TASKS: Registry[Task] = Registry("retrieval task", "rope_patch.tasks", ("source", "questions"))
"""Every retrieval task by name. A subclass of :class:`Task` with a name enters itself."""


@dataclass(frozen=True)
class Question:
    """One question with its needles, before its prompt is fitted to a length.

    Attributes:
        hidden: depth and text of every needle in the prompt, by rising depth.
        text: text of the question.
        answer_prefix: beginning of the answer, with which the prompt ends; in a chat it stands in the assistant's turn.
        parts: strings that the answer must give, in the order in which they are asked for.
        depths: depth of the needle that each part is from.
        context: function that returns the text of the question's own, which replaces the haystack, as a number of
            pieces that are never cut. For a larger ``size`` it returns more pieces, and for 0 the fewest that the
            question needs; it raises ValueError if there are not enough. None if the haystack is the text.
        opening: text before the context, which then loses the space at its start.
        closing: text after the context.
        between_sentences: whether needles stand between the sentences of the haystack, and not between any words.
        separator: the text between the parts of an answer.
        numbered: whether the answer numbers its parts, as ``1. river 2. road``.
    """

    hidden: tuple[tuple[float, str], ...]
    text: str
    answer_prefix: str
    parts: tuple[str, ...]
    depths: tuple[float, ...]
    context: Callable[[int], Sequence[str]] | None = None
    opening: str = ""
    closing: str = ""
    between_sentences: bool = False
    separator: str = ", "
    numbered: bool = False

    def answer(self, parts: int) -> str:
        """Return the first parts of the right answer as they continue the answer's prefix."""
        said: Sequence[str] = self.parts[:parts]
        if self.numbered:
            said = [f"{number}. {part}" for number, part in enumerate(said, 1)]
        return " " + self.separator.join(said)

    @property
    def target(self) -> str:
        """The right answer as it continues the answer's prefix."""
        return self.answer(len(self.parts))


@dataclass(frozen=True)
class Draw:
    """Draws random values and names that have the same number of tokens, so that prompts fit into one batch.

    Attributes:
        tokenizer: the tokenizer that counts the tokens.
        rng: the source of randomness.
        length: the length of the prompts [tokens].
        sample: the number of the haystack.
    """

    tokenizer: Any
    rng: random.Random
    length: int = 0
    sample: int = 0

    def number(self, digits: int) -> str:
        """Return a number with this number of digits, of which the first is not 0, as in RULER."""
        return str(self.rng.randrange(10 ** (digits - 1), 10**digits))

    def numbers(self, count: int, digits: int) -> list[str]:
        """Return ``count`` different numbers, as :meth:`number` draws them.

        Args:
            count: the number of numbers that are returned.
            digits: the number of digits of each.
        """
        # More than needed, because some repeat and some have another number of tokens.
        pool = [self.number(digits) for _ in range(64 + count)]
        return self.equally_long(list(dict.fromkeys(pool)), count)

    def names(self, count: int) -> list[str]:
        """Return ``count`` different English nouns."""
        return self.words(NOUNS.split(), count)

    def words(self, words: Sequence[str], count: int) -> list[str]:
        """Return ``count`` of these words, in random order."""
        return self.equally_long(self.rng.sample(words, len(words)), count)

    def of_common_length(self, endless: Callable[[random.Random], Iterator[str]], count: int) -> list[str]:
        """Return different items that have the most common number of tokens, which is found with one fixed seed.

        Because of the fixed seed, the items of all haystacks have the same number of tokens.

        Args:
            endless: function that yields items, from a source of randomness.
            count: the number of items that are returned.
        """
        size = common_size(self.tokenizer, endless)
        pool = dict.fromkeys(itertools.islice(endless(self.rng), 64 + 8 * count))
        return self.equally_long(list(pool), count, size)

    def equally_long(self, pool: Sequence[str], count: int, size: int | None = None) -> list[str]:
        """Return items of a pool, first those with the given number of tokens.

        Args:
            pool: the different items to choose from.
            count: the number of items that are returned.
            size: number of tokens of an item; by default the most common one in the pool [tokens].

        Raises:
            ValueError: the pool holds fewer items than ``count``.
        """
        sizes = sizes_of(self.tokenizer, pool)
        common = _most_common(sizes) if size is None else size
        ranked = sorted(range(len(pool)), key=lambda i: sizes[i] != common)  # stable: those of the common size first
        if len(pool) < count:
            raise ValueError(f"{count} needles are too many: there are {len(pool)} different names")
        return [pool[i] for i in ranked[:count]]


@functools.lru_cache(maxsize=8)
def common_size(tokenizer: Any, endless: Callable[[random.Random], Iterator[str]]) -> int:
    """Return the most common number of tokens of the items that a function yields, from a fixed seed."""
    return _most_common(sizes_of(tokenizer, list(itertools.islice(endless(random.Random(0)), 128))))


def sizes_of(tokenizer: Any, items: Sequence[str]) -> list[int]:
    """Return the number of tokens of each item, with the space before it, as it stands in a text.

    Many tokenizers make other tokens without that space.
    """
    encoded = tokenizer([f" {item}" for item in items], add_special_tokens=False)["input_ids"]
    return [len(ids) for ids in encoded]


def _most_common(sizes: Sequence[int]) -> int:
    # The smaller of equally common sizes, so that the choice does not depend on the order.
    return max(set(sizes), key=lambda size: (sizes.count(size), -size))


def endless_uuids(rng: random.Random) -> Iterator[str]:
    """Yield UUIDs of version 4 that begin with a digit, all different.

    Many tokenizers merge a space with a letter but not with a digit, so the first character has to be of one kind.
    """
    while True:
        text = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        if text[0].isdigit():
            yield text


def endless_pairs(rng: random.Random) -> Iterator[str]:
    """Yield pairs of an adjective and a noun; some come again."""
    adjectives, nouns = ADJECTIVES.split(), NOUNS.split()
    while True:
        yield f"{rng.choice(adjectives)}-{rng.choice(nouns)}"


def drawn_once(pieces: Iterator[str]) -> Callable[[int], list[str]]:
    """Return a context of these pieces, which all questions share: a larger size adds to them and changes none."""
    drawn = list[str]()

    def context(size: int) -> list[str]:
        drawn.extend(itertools.islice(pieces, max(0, size - len(drawn))))
        return drawn[:size]

    return context


class Task(ABC):
    """A retrieval task. A subclass is registered under its name, by which ``--tasks`` and Python functions find it.

    Attributes:
        name: name of the task.
        source: paper that the task is from, and how ours differs from it.
        joined: whether one question asks for all needles at once.
        anywhere: whether a part counts wherever it stands in the output, in upper or lower case, as lm-eval's scorer of
            RULER counts it (``string_match_all``).
        generated: the number of tokens within which a part is looked for; as many as the right answer has by default.
        essay: whether the haystack is a text with content, so that the built-in one takes the place of noise.
        suite: the name by which ``--tasks`` asks for all tasks of a kind; empty for a task of its own.
    """

    name: str
    source: ClassVar[str]
    joined: ClassVar[bool] = False
    anywhere: ClassVar[bool] = False
    generated: ClassVar[int] = 0
    essay: ClassVar[bool] = False
    suite: ClassVar[str] = ""

    def __init_subclass__(cls, name: str | None = None) -> None:
        """Register the task under its name.

        Raises:
            ValueError: another task has this name.
        """
        if name is None:
            return
        cls.name = name
        TASKS.add(name, cls())

    @abstractmethod
    def questions(self, depths: Sequence[float], draw: Draw) -> list[Question]:
        """Return the questions about one haystack: one for each depth, or a single one if the task is joined.

        Args:
            depths: depths of the needles, rising.
            draw: source of values and names.
        """

    def correct(self, part: str, output: str) -> bool:
        """Return whether a generated answer gives a part that was asked for."""
        if self.anywhere:
            return part.lower() in output.lower()
        # The answer's prefix ends just before the value, so a right answer to a single question begins with it.
        return part in output if self.joined else output.strip().startswith(part)


def members(suite: str) -> list[str]:
    """Return the names of the tasks of a suite, in the order of their definition; none for another name."""
    return [name for name, task in TASKS.items() if suite and task.suite == suite]


class NeedleTask(Task):
    """A task with a number in each needle and a question for each number.

    Attributes:
        needle: text of a needle, with ``{name}`` and ``{value}``.
        question: text of the question, with ``{name}``.
        answer_prefix: beginning of the answer, up to the value, with ``{name}``; empty by default.
        digits: number of digits of each value.
    """

    needle: ClassVar[str]
    question: ClassVar[str]
    answer_prefix: ClassVar[str] = ""
    digits: ClassVar[int]

    def questions(self, depths: Sequence[float], draw: Draw) -> list[Question]:
        """Return a question for each depth."""
        values = self.values(len(depths), draw)
        names = self.names(len(depths), draw)
        return [
            Question(
                hidden=((depth, self.needle.format(value=value, name=name)),),
                text=self.question.format(name=name),
                answer_prefix=self.answer_prefix.format(name=name),
                parts=(value,),
                depths=(depth,),
            )
            for depth, value, name in zip(depths, values, names, strict=True)
        ]

    def values(self, count: int, draw: Draw) -> list[str]:
        """Return different values, equally long in tokens."""
        return draw.numbers(count, self.digits)

    def names(self, count: int, draw: Draw) -> list[str]:
        """Return the names that the values belong to."""
        return draw.names(count)
