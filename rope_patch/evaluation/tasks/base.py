"""A retrieval task: what is hidden in a text, what is asked about it, and when an answer is right."""

from __future__ import annotations

import itertools
import random
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rope_patch.evaluation.haystack import Haystack
from rope_patch.registry import Registry

NOUNS = """
    apple bird bridge candle castle cloud copper dragon eagle engine falcon feather forest garden ginger hammer
    harbor helmet island jacket kettle ladder lemon lion magnet maple marble meadow mirror mountain needle ocean
    olive orange otter paper pearl pepper pillow pirate planet pocket pumpkin puzzle rabbit ribbon river rocket
    saddle silver spider sugar table temple thunder tiger tomato tower tunnel turtle valley velvet violin wagon
    walnut whale willow window winter wizard yellow zebra
"""
"""What named needles are called."""

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
"""Of keys and words of two parts."""

TRAINING_NEEDLES = 4
"""Of a training prompt that asks for all its needles at once, as many as RULER's (arXiv:2404.06654) have."""

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

TASKS: Registry[Task] = Registry("retrieval task", "rope_patch.tasks", ("source", "questions"))
"""Every retrieval task by name. A subclass of :class:`Task` with a name enters itself."""


@dataclass(frozen=True)
class Question:
    """One question, before it is fitted to a length.

    Attributes:
        hidden: depth and text of every needle in the prompt, by rising depth.
        text: the question.
        answer_prefix: how the answer begins; the prompt ends with it, in a chat within the assistant's turn.
        parts: the strings looked for in the answer, in the order they are asked for.
        depths: depth of the needle that each part is from.
        context: a text of the question's own, in place of the haystack. It returns the pieces of the text, none of
            which is ever cut, for any size: more pieces for a larger one, and for 0 the fewest that the question
            needs; it raises ValueError where there are not so many. None for the words of the haystack.
        opening: what stands before the context.
        closing: what stands after it.
    """

    hidden: tuple[tuple[float, str], ...]
    text: str
    answer_prefix: str
    parts: tuple[str, ...]
    depths: tuple[float, ...]
    context: Callable[[int], Sequence[str]] | None = None
    opening: str = ""
    closing: str = ""

    @property
    def target(self) -> str:
        """The right answer as it continues the answer's prefix."""
        return " " + ", ".join(self.parts)


@dataclass(frozen=True)
class Draw:
    """Random values and names that have equally many tokens, so that prompts fit into one batch.

    Attributes:
        tokenizer: of the model.
        rng: the source of randomness.
        length: of prompt and answer together [tokens].
        haystack: that the prompt is made for.
    """

    tokenizer: Any
    rng: random.Random
    length: int
    haystack: Haystack

    def numbers(self, count: int, digits: int) -> list[str]:
        """Return different numbers of so many digits.

        Args:
            count: how many numbers.
            digits: of each number.
        """
        pool = ["".join(self.rng.choices("0123456789", k=digits)) for _ in range(64 + count)]
        return self.equally_long(list(dict.fromkeys(pool)), count)

    def names(self, count: int) -> list[str]:
        """Return different English nouns."""
        return self.words(NOUNS.split(), count)

    def words(self, words: Sequence[str], count: int) -> list[str]:
        """Return some of these words, in random order."""
        return self.equally_long(self.rng.sample(words, len(words)), count)

    def variables(self, count: int) -> list[str]:
        """Return different variable names of three capital letters."""
        return self.equally_long(
            list(dict.fromkeys("".join(self.rng.sample(LETTERS, 3)) for _ in range(64 + count))),
            count,
        )

    def uuids(self, count: int) -> list[str]:
        """Return different UUIDs of version 4."""
        return self.of_common_length(endless_uuids, count)

    def pairs_of_words(self, count: int) -> list[str]:
        """Return different pairs of an adjective and a noun, such as ``quiet-river``."""
        return self.of_common_length(endless_pairs, count)

    def of_common_length(self, endless: Callable[[random.Random], Iterator[str]], count: int) -> list[str]:
        """Return items that have the number of tokens that is most common among those of one fixed seed.

        So the items of all haystacks have equally many.

        Args:
            endless: yields different items.
            count: how many of them.
        """
        sizes = self._sizes(list(itertools.islice(endless(random.Random(0)), 128)))
        return self.equally_long(list(itertools.islice(endless(self.rng), 64 + 8 * count)), count, _most_common(sizes))

    def equally_long(self, pool: Sequence[str], count: int, size: int | None = None) -> list[str]:
        """Return items of a pool, those with so many tokens first.

        Args:
            pool: different items.
            count: how many of them.
            size: the most common one in the pool by default [tokens].

        Raises:
            ValueError: the pool holds fewer items.
        """
        sizes = self._sizes(pool)
        common = _most_common(sizes) if size is None else size
        ranked = sorted(range(len(pool)), key=lambda i: sizes[i] != common)  # stable: those of the common size first
        if len(pool) < count:
            raise ValueError(f"{count} needles are too many: there are {len(pool)} different names")
        return [pool[i] for i in ranked[:count]]

    def _sizes(self, items: Sequence[str]) -> list[int]:
        encoded = self.tokenizer([f" {item}" for item in items], add_special_tokens=False)["input_ids"]
        return [len(ids) for ids in encoded]


def _most_common(sizes: Sequence[int]) -> int:
    return max(set(sizes), key=lambda size: (sizes.count(size), -size))


def endless_uuids(rng: random.Random) -> Iterator[str]:
    """Yield UUIDs of version 4 that begin with a digit, all different.

    Many tokenizers join a space with a letter, and not with a digit.
    """
    while True:
        made = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        if made[0].isdigit():
            yield made


def endless_pairs(rng: random.Random) -> Iterator[str]:
    """Yield pairs of an adjective and a noun, all different; when there are no more, those with a second noun."""
    pairs = [f"{adjective}-{noun}" for adjective in ADJECTIVES.split() for noun in NOUNS.split()]
    yield from rng.sample(pairs, len(pairs))
    for noun in NOUNS.split():
        yield from (f"{pair}-{noun}" for pair in rng.sample(pairs, len(pairs)))


class Task(ABC):
    """A kind of retrieval question. A subclass with a name can be asked for by it everywhere.

    Attributes:
        name: what users call it.
        source: where the task is from, and how ours differs.
        joined: one question asks for all needles at once.
        placed: its needles stand at depths. Else what is asked for stands everywhere in the text, the depths change
            nothing, and results list the parts of the answer by their order, from 0 for the first to 1 for the last.
        anywhere: a part counts wherever it stands in the output, whatever its case, as lm-eval's scorer of RULER counts
            it (``string_match_all``).
    """

    name: ClassVar[str]
    source: ClassVar[str]
    joined: ClassVar[bool] = False
    placed: ClassVar[bool] = True
    anywhere: ClassVar[bool] = False

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
        """Return the questions about one haystack: one for each depth, or a single one that asks for all needles.

        Args:
            depths: of the needles, rising.
            draw: values and names.
        """

    def correct(self, part: str, output: str) -> bool:
        """Tell whether a generated answer gives a part that was asked for."""
        if self.anywhere:
            return part.lower() in output.lower()
        return part in output if self.joined else output.strip().startswith(part)


class NeedleTask(Task):
    """A number for each needle, and a question for each number.

    Attributes:
        needle: the text that is hidden, with ``{name}`` and ``{value}``.
        question: what is asked at the end, with ``{name}``.
        answer_prefix: how the answer begins, up to the value, with ``{name}``; nothing by default.
        digits: of the numbers.
    """

    needle: ClassVar[str]
    question: ClassVar[str]
    answer_prefix: ClassVar[str] = ""
    digits: ClassVar[int]

    def questions(self, depths: Sequence[float], draw: Draw) -> list[Question]:
        """Return a question for each depth."""
        return [
            Question(
                hidden=((depth, self.needle.format(value=value, name=name)),),
                text=self.question.format(name=name),
                answer_prefix=self.answer_prefix.format(name=name),
                parts=(value,),
                depths=(depth,),
            )
            for depth, value, name in zip(depths, *self.values_and_names(len(depths), draw), strict=True)
        ]

    def values_and_names(self, count: int, draw: Draw) -> tuple[list[str], list[str]]:
        """Return so many values, and the names they belong to."""
        return draw.numbers(count, self.digits), draw.names(count)


class CrowdedTask(NeedleTask):
    """Needles among others of their kind, which are the whole text.

    Attributes:
        opening: what stands before the needles.
        closing: what stands after them; it may have ``{name}`` and ``{value}`` of one more.
    """

    opening: ClassVar[str] = ""
    closing: ClassVar[str] = ""
    anywhere = True

    @abstractmethod
    def others(self, draw: Draw) -> Iterator[tuple[str, str]]:
        """Yield name and value of more needles, as many as there are; some may be those asked for."""

    def questions(self, depths: Sequence[float], draw: Draw) -> list[Question]:
        """Return a question for each depth; the other needles are the same for all."""
        asked = super().questions(depths, draw)
        asked_for = "".join(text for question in asked for _, text in question.hidden)
        others = (
            (name, value) for name, value in self.others(draw) if name not in asked_for and value not in asked_for
        )
        closing, pieces = self.closing, list[str]()
        if "{name}" in closing:
            name, value = next(others)
            closing = closing.format(name=name, value=value)

        def context(size: int) -> list[str]:
            missing = itertools.islice(others, max(0, size - len(pieces)))
            pieces.extend(self.needle.format(name=name, value=value) for name, value in missing)
            if len(pieces) < size:
                raise ValueError(
                    f"the haystack gives {self.name} {len(pieces)} pieces of text, too few for this length: give a "
                    "longer haystack, or a shorter length"
                )
            return pieces[:size]

        return [replace(one, context=context, opening=self.opening, closing=closing) for one in asked]


class UuidTask(CrowdedTask):
    """A UUID for each UUID, among others."""

    def values_and_names(self, count: int, draw: Draw) -> tuple[list[str], list[str]]:
        """Return values and the names they belong to."""
        return draw.uuids(count), draw.uuids(count)

    def others(self, draw: Draw) -> Iterator[tuple[str, str]]:
        """Yield other names and values."""
        return zip(endless_uuids(draw.rng), endless_uuids(draw.rng), strict=True)


def in_order(count: int) -> tuple[float, ...]:
    """Return what stands for the depths of so many parts that have none: their places in the answer.

    >>> in_order(3)
    (0.0, 0.5, 1.0)
    """
    return tuple(i / (count - 1) for i in range(count))
