"""A retrieval task: what is hidden in a text, what is asked about it, and when an answer is right."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rope_patch.words import did_you_mean

NAMES = """
    apple bird bridge candle castle cloud copper dragon eagle engine falcon feather forest garden ginger hammer
    harbor helmet island jacket kettle ladder lemon lion magnet maple marble meadow mirror mountain needle ocean
    olive orange otter paper pearl pepper pillow pirate planet pocket pumpkin puzzle rabbit ribbon river rocket
    saddle silver spider sugar table temple thunder tiger tomato tower tunnel turtle valley velvet violin wagon
    walnut whale willow window winter wizard yellow zebra
"""
"""What named needles are called."""

NEEDLES = 4
"""Of a training prompt that asks for all its needles at once, as many as RULER's (arXiv:2404.06654) have."""

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

TASKS: dict[str, Task] = {}
"""Every retrieval task by name. A subclass of :class:`Task` with a name enters itself."""

MODES = ("single", "multikey")


@dataclass(frozen=True)
class Question:
    """One question, before it is fitted to a length.

    Attributes:
        hidden: depth and text of every needle in the prompt, by rising depth.
        text: the question.
        answer_prefix: how the answer begins; the prompt ends with it, in a chat within the assistant's turn.
        parts: the strings looked for in the answer, in the order they are asked for.
        depths: depth of the needle that each part is from.
    """

    hidden: tuple[tuple[float, str], ...]
    text: str
    answer_prefix: str
    parts: tuple[str, ...]
    depths: tuple[float, ...]

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
    """

    tokenizer: Any
    rng: random.Random

    def numbers(self, count: int, digits: int) -> list[str]:
        """Return different numbers of so many digits.

        Args:
            count: how many numbers.
            digits: of each number.
        """
        pool = ["".join(self.rng.choices("0123456789", k=digits)) for _ in range(64 + count)]
        return self.alike(list(dict.fromkeys(pool)), count)

    def names(self, count: int) -> list[str]:
        """Return different English nouns."""
        names = NAMES.split()
        return self.alike(self.rng.sample(names, len(names)), count)

    def variables(self, count: int) -> list[str]:
        """Return different variable names of three capital letters."""
        return self.alike(
            list(dict.fromkeys("".join(self.rng.sample(LETTERS, 3)) for _ in range(64 + count))),
            count,
        )

    def alike(self, pool: Sequence[str], count: int) -> list[str]:
        """Return items of a pool, those with the most common number of tokens first.

        Raises:
            ValueError: the pool holds fewer items.
        """
        encoded = self.tokenizer([f" {item}" for item in pool], add_special_tokens=False)["input_ids"]
        sizes = [len(ids) for ids in encoded]
        common = max(set(sizes), key=lambda size: (sizes.count(size), -size))
        ranked = sorted(range(len(pool)), key=lambda i: sizes[i] != common)  # stable: those of the common size first
        if len(pool) < count:
            raise ValueError(f"{count} needles are too many: there are {len(pool)} different names")
        return [pool[i] for i in ranked[:count]]


class Task(ABC):
    """A kind of retrieval question. A subclass with a name can be asked for by it everywhere.

    Attributes:
        name: what users call it.
        source: where the task is from, and how ours differs.
        modes: of :data:`MODES`, those that it knows.
        joined: one question asks for all needles at once.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    modes: ClassVar[tuple[str, ...]] = ("single",)
    joined: ClassVar[bool] = False

    def __init_subclass__(cls, name: str | None = None) -> None:
        """Register the task under its name.

        Raises:
            ValueError: another task has this name.
        """
        if name is None:
            return
        if name in TASKS:
            raise ValueError(f"there is a task {name!r} already: {type(TASKS[name]).__qualname__}")
        cls.name = name
        TASKS[name] = cls()

    @abstractmethod
    def questions(self, depths: Sequence[float], mode: str, draw: Draw) -> list[Question]:
        """Return the questions about one haystack: one for each depth, or a single one that asks for all needles.

        Args:
            depths: of the needles, rising.
            mode: ``"single"``, one needle in each prompt, or ``"multikey"``, all needles in every prompt.
            draw: values and names.
        """

    def correct(self, part: str, output: str) -> bool:
        """Tell whether a generated answer gives a part that was asked for."""
        return part in output if self.joined else output.strip().startswith(part)


class NeedleTask(Task):
    """A number for each needle, and a question for each number.

    Attributes:
        needle: the text that is hidden, with ``{name}`` and ``{value}``.
        question: what is asked at the end, with ``{name}``.
        answer_prefix: how the answer begins, up to the value, with ``{name}``; nothing by default.
        digits: of the numbers.
        named: needles have names also where there is one in each prompt.
        multikey: needle, question and prefix where a prompt holds several needles; as above by default.
    """

    needle: ClassVar[str]
    question: ClassVar[str]
    answer_prefix: ClassVar[str] = ""
    digits: ClassVar[int]
    named: ClassVar[bool] = True
    multikey: ClassVar[tuple[str, str, str] | None] = None
    modes = MODES

    def questions(self, depths: Sequence[float], mode: str, draw: Draw) -> list[Question]:
        """Return a question for each depth."""
        several = mode == "multikey"
        texts = self.needle, self.question, self.answer_prefix
        needle, question, prefix = self.multikey if several and self.multikey else texts
        values = draw.numbers(len(depths), self.digits)
        names = draw.names(len(depths)) if self.named or several else [""] * len(depths)
        needles = [needle.format(value=value, name=name) for value, name in zip(values, names, strict=True)]
        hidden = tuple(zip(depths, needles, strict=True))
        return [
            Question(
                hidden=hidden if several else hidden[i : i + 1],
                text=question.format(name=name),
                answer_prefix=prefix.format(name=name),
                parts=(value,),
                depths=(depth,),
            )
            for i, (depth, value, name) in enumerate(zip(depths, values, names, strict=True))
        ]


def find_task(task: str, mode: str = "single") -> Task:
    """Return a task.

    Args:
        task: its name.
        mode: that it is to be asked in.

    Raises:
        ValueError: an unknown name or mode; the known ones are named.
    """
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}. Known: {', '.join(MODES)}")
    known = {name: other for name, other in TASKS.items() if mode in other.modes}
    if task not in known:
        hint = did_you_mean(task, known)
        raise ValueError(f"unknown task {task!r} in mode {mode!r}.{hint} Known: {', '.join(known)}")
    return known[task]
