"""Retrieval prompts as text, of an exact length in tokens of the model at hand. Nothing here touches a model."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_patch.evaluation.documents import documents, prefix_ids
from rope_patch.evaluation.text import builtin_text

NOISE = "The road goes on and on. The hill is far away. We walk all day. Then we rest a while, and walk on again. "
"""What a haystack of noise repeats."""

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


@dataclass(frozen=True)
class Haystack:
    """A text to hide things in.

    Attributes:
        text: the text.
        name: what results call it.
        endless: say the text again when it is too short: for noise. A book said twice would be another task.
        python_version: whose files the built-in text is made of.
    """

    text: str
    name: str = "text"
    endless: bool = False
    python_version: str | None = None

    @property
    def sha256(self) -> str:
        """Digest of the text."""
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()

    @classmethod
    def of(cls, source: str | Path | Haystack) -> Haystack:
        """Return the haystack called ``"builtin"`` or ``"noise"``, or that of a file or folder (``Path``).

        Raises:
            FileNotFoundError: no such file.
            ValueError: an unknown name, or no text.
        """
        match source:
            case Haystack():
                made = source
            case "builtin":
                corpus = builtin_text("haystack")
                made = cls(corpus.text, "builtin", python_version=corpus.python_version)
            case "noise":
                made = cls(NOISE, "noise", endless=True)
            case Path():
                made = cls("\n\n".join(document.text for document in documents(source)), source.name)
            case _:
                raise ValueError(f"haystack must be 'builtin', 'noise' or a Path, got {source!r}")
        if not made.text.strip():
            raise ValueError("the haystack is empty")
        return made


@dataclass(frozen=True)
class Prompt:
    """One question with its answer, as text and in tokens of the model at hand.

    Attributes:
        text: the question's text; the answer follows it.
        target: the answer, as it would be continued.
        ids: both, special tokens in front included [tokens of this tokenizer].
        answer: how many of the last ids are the answer.
        parts: the strings looked for in an answer: one, or one per needle.
        ends: where each part ends within the answer [tokens].
        depths: of the needle each part is from, 0 for the start and 1 for just before the question.
    """

    text: str
    target: str
    ids: tuple[int, ...]
    answer: int
    parts: tuple[str, ...]
    ends: tuple[int, ...]
    depths: tuple[float, ...]


@dataclass(frozen=True)
class Task:
    """A kind of question, as templates. ``{value}`` is what is asked for, ``{name}`` tells needles apart.

    Attributes:
        needle: what is hidden; ``{before}`` is the name of the needle before it.
        question: what ends the prompt.
        digits: of a value.
        first: the needle that starts a chain.
        joined: all needles are asked for in one question.
        named: needles have names.
        source: where the task is from, and how ours differs.
    """

    needle: str
    question: str
    source: str
    digits: int = 5
    first: str | None = None
    joined: bool = False
    named: bool = True


TASKS = {
    "passkey": Task(
        " The pass key is {value}. Remember it.",
        " What is the pass key? The pass key is",
        "Mohtashami & Jaggi (2023), arXiv:2305.16300",
        named=False,
    ),
    "niah": Task(
        " The magic number of {name} is {value}.",
        " What is the magic number of {name}? The magic number of {name} is",
        "Hsieh et al. (2024), RULER, arXiv:2404.06654, NIAH; ours hides one key per needle and no distractors",
        digits=7,
    ),
    "multivalue": Task(
        " One magic number of {name} is {value}.",
        " What are all the magic numbers of {name}? In order, the magic numbers of {name} are",
        "RULER, multi-value NIAH; ours asks for them in their order",
        digits=7,
        joined=True,
    ),
    "multiquery": Task(
        " The magic number of {name} is {value}.",
        " What are the magic numbers of {names}? In this order, they are",
        "RULER, multi-query NIAH; ours asks for them in their order",
        digits=7,
        joined=True,
    ),
    "vt": Task(
        " VAR {name} = VAR {before}.",
        " Which variables have the value {value}? In order, they are",
        "RULER, variable tracking, one chain",
        first=" VAR {name} = {value}.",
        joined=True,
    ),
}
"""Every retrieval task by name."""

MULTIKEY = {
    "passkey": Task(
        " The pass key {name} is {value}. Remember it.",
        " What is the pass key {name}? The pass key {name} is",
        "ours: a key at every depth, one question each (RULER's multi-key adds distractors to one question)",
    ),
    "niah": TASKS["niah"],
}
"""The tasks that ``multikey`` mode knows."""

MODES = ("single", "multikey")


class PromptMaker:
    """Makes prompts for a tokenizer and a haystack.

    Lengths are exact: the whole prompt is tokenised, and the haystack is cut, by words and then by characters at its
    end, until the number of tokens is the one asked for. So the text means the same to any program that reads it.

    Args:
        tokenizer: of the model.
        haystack: what the needles are hidden in.
        bos: as in :func:`~rope_patch.evaluation.documents.prefix_ids`.
        prefix: special tokens in front of each prompt, in place of what ``bos`` says.

    Raises:
        ValueError: no text, or ``bos=True`` without such a token.
    """

    def __init__(
        self,
        tokenizer: Any,
        haystack: str | Path | Haystack = "builtin",
        bos: bool | None = None,
        *,
        prefix: Sequence[int] | None = None,
    ) -> None:
        self.tokenizer, self.haystack = tokenizer, Haystack.of(haystack)
        self.prefix = prefix_ids(tokenizer, bos) if prefix is None else tuple(prefix)
        self.words: list[str] = re.findall(r"\s*\S+", self.haystack.text)
        if self.haystack.endless:  # so that words of one copy follow those of the one before
            self.words[0] = f" {self.words[0].lstrip()}"
        different = list(dict.fromkeys(self.words))
        coded = tokenizer(different, add_special_tokens=False, verbose=False)["input_ids"]
        size = dict(zip(different, map(len, coded), strict=True))
        # Tokens of the words up to each: an estimate, since neighbours may merge.
        self.upto: list[int] = [0, *itertools.accumulate(size[word] for word in self.words)]

    def prompts(
        self, task: str, length: int, depths: Sequence[float], *, mode: str = "single", seed: int = 0, sample: int = 0
    ) -> list[Prompt]:
        """Return the prompts of one haystack.

        Args:
            task: a key of ``TASKS``.
            length: of prompt and answer together [tokens].
            depths: of the needles, each in [0, 1].
            mode: ``"single"``, a prompt per depth with one needle in it, or ``"multikey"``, a needle at every depth
                in all prompts and a prompt per depth that asks for it. A task that asks for all its needles at once
                gives a single prompt.
            seed: of values, names and haystacks.
            sample: number of the haystack.

        Raises:
            ValueError: an unknown task or mode, a depth outside [0, 1], a length with no room for the task, a haystack
                that is too short, or a tokenizer that merges the answer with the question.
        """
        kind = find_task(task, mode)
        for depth in depths:
            if not 0 <= depth <= 1:
                raise ValueError(f"depth must be in [0, 1], got {depth}")
        if not depths:
            raise ValueError("depths is empty")
        rng = random.Random(f"{seed}/{task}/{mode}/{length}/{sample}")
        start = rng.random()  # where in the haystack
        order = sorted(range(len(depths)), key=lambda i: depths[i])
        values, names = self._values(kind, len(depths), rng), self._names(kind, len(depths), rng)
        made: dict[int, Prompt] = {}
        fit = _Fit(self, length, start)
        if kind.joined:
            needles, question, parts = _joined(kind, values, names)
            places = sorted(depths)
            target = " " + ", ".join(parts)
            return [fit(list(zip(places, needles, strict=True)), question, target, parts, places)]
        needles = [kind.needle.format(value=v, name=n) for v, n in zip(values, names, strict=True)]
        for rank, i in enumerate(order):
            hidden = (
                list(zip(sorted(depths), needles, strict=True)) if mode == "multikey" else [(depths[i], needles[rank])]
            )
            question = kind.question.format(name=names[rank])
            made[i] = fit(hidden, question, f" {values[rank]}", [values[rank]], [depths[i]])
        return [made[i] for i in range(len(depths))]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with the special tokens in front."""
        return [*self.prefix, *self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]

    def _values(self, task: Task, count: int, rng: random.Random) -> list[str]:
        """Different numbers of one length in tokens, the one most of them have; so prompts fit in batches."""
        drawn = ["".join(rng.choices("0123456789", k=task.digits)) for _ in range(64 + count)]
        return self._alike(list(dict.fromkeys(drawn)), count)

    def _names(self, task: Task, count: int, rng: random.Random) -> list[str]:
        if not task.named:
            return [""] * count
        if task.first is not None:
            letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
            pool = list(dict.fromkeys("".join(rng.sample(letters, 3)) for _ in range(64 + count)))
        else:
            names = NAMES.split()
            pool = rng.sample(names, len(names))
        if task.first is None and task.joined and "{names}" not in task.question:
            return self._alike(pool, 1) * count
        return self._alike(pool, count)

    def _alike(self, pool: list[str], count: int) -> list[str]:
        coded = self.tokenizer([f" {item}" for item in pool], add_special_tokens=False)["input_ids"]
        sizes = [len(ids) for ids in coded]
        common = max(set(sizes), key=lambda size: (sizes.count(size), -size))
        ranked = sorted(range(len(pool)), key=lambda i: sizes[i] != common)  # stable: those of the common size first
        if len(pool) < count:
            raise ValueError(f"{count} needles are too many: there are {len(pool)} different names")
        return [pool[i] for i in ranked[:count]]


def find_task(task: str, mode: str = "single") -> Task:
    """Return a task in a mode.

    Raises:
        ValueError: an unknown one; the known ones are named.
    """
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}. Known: {', '.join(MODES)}")
    known = TASKS if mode == "single" else MULTIKEY
    if task not in known:
        raise ValueError(f"unknown task {task!r} in mode {mode!r}. Known: {', '.join(known)}")
    return known[task]


def _joined(task: Task, values: list[str], names: list[str]) -> tuple[list[str], str, list[str]]:
    """Needles, question and answers of a task that asks for all at once."""
    if task.first is None:
        needles = [task.needle.format(value=v, name=n) for v, n in zip(values, names, strict=True)]
        listed = ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else names[0]
        return needles, task.question.format(name=names[0], names=listed), values
    needles = [task.first.format(name=names[0], value=values[0])]
    needles += [task.needle.format(name=name, before=before) for before, name in itertools.pairwise(names)]
    return needles, task.question.format(value=values[0]), names


class _Fit:
    """Fits prompts around one stretch of the haystack. What fitted the last prompt is where the next one starts."""

    tries = 40

    def __init__(self, maker: PromptMaker, length: int, start: float) -> None:
        self.maker, self.length, self.start = maker, length, start
        self.first: int | None = None
        self.count = self.trim = 0

    def __call__(
        self, hidden: list[tuple[float, str]], question: str, target: str, parts: Sequence[str], depths: Sequence[float]
    ) -> Prompt:
        maker = self.maker
        bare = maker.encode("".join(needle for _, needle in hidden) + question + target)
        room = self.length - len(bare)
        if room < 0:
            raise ValueError(f"this prompt needs at least {len(bare)} tokens with this tokenizer, got {self.length}")
        if self.first is None:
            self.first = self._place(room)
        for _ in range(self.tries):
            found = self._exact(hidden, question, target, room)
            if found is not None:
                return self._prompt(*found, target, parts, depths)
            self.first, self.count, self.trim = self.first + 1, 0, 0  # later depths share the stretch that fits
        raise ValueError(f"found no haystack of exactly {room} tokens with this tokenizer: try another length")

    def _place(self, room: int) -> int:
        """The first word of a stretch of that many tokens."""
        upto = self.maker.upto
        if self.maker.haystack.endless:
            return int(self.start * (len(upto) - 1))
        # Some words more, so that a stretch that does not fit exactly can begin a little later.
        last = bisect.bisect_right(upto, upto[-1] - room) - 1 - 2 * self.tries
        if upto[-1] < room or (room and last < 0 and upto[-1] < room + 2 * self.tries):
            raise ValueError(
                f"the haystack has {upto[-1]} tokens, {room} and some to spare are needed: give a longer one"
            )
        return int(self.start * (max(last, 0) + 1))

    def _exact(
        self, hidden: list[tuple[float, str]], question: str, target: str, room: int
    ) -> tuple[str, list[int]] | None:
        """The text that has the exact length with its answer, and its ids; None when this stretch gives none."""
        maker = self.maker
        if self.count == 0 and room:
            self.count = self._words_for(self._first, room)
        for _ in range(self.tries):
            text = self._text(hidden, question, self.trim)
            ids = maker.encode(text + target)
            excess = len(ids) - self.length
            if excess == 0:
                return text, ids
            if self.trim:  # what fitted the prompt before, or seemed to
                self.trim = 0
            elif excess < 0:
                more = self._words_for(self._first + self.count, -excess)
                if more == 0:
                    return None
                self.count += more
            elif dropped := self._words_within(excess):
                self.count -= dropped
            else:
                trim = self._trim(hidden, question, target, excess)
                if trim is None:
                    return None
                self.trim = trim
        return None

    def _trim(self, hidden: list[tuple[float, str]], question: str, target: str, excess: int) -> int | None:
        """How many characters less of the last word make so many tokens less; None if no number does.

        Only the end of the text is tokenised for it: what comes long before the cut does not see it.
        """
        maker = self.maker
        whole = self._text(hidden, question, 0)
        start = max(0, len(whole) - len(question) - sum(len(needle) for _, needle in hidden) - 300)
        size = len(maker.encode(whole[start:] + target))
        word = self._words(self.count)[-1] if self.count else ""
        for trim in range(1, len(word)):
            if size - len(maker.encode(self._text(hidden, question, trim)[start:] + target)) == excess:
                return trim
        return None

    def _text(self, hidden: list[tuple[float, str]], question: str, trim: int) -> str:
        words = self._words(self.count)
        if words and trim:
            words[-1] = words[-1][:-trim]
        pieces, at = [], 0
        for depth, needle in hidden:
            place = round(depth * len(words))
            pieces += [*words[at:place], needle]
            at = place
        text = "".join([*pieces, *words[at:], question])
        # A needle is written alike at every depth, at the start too, where a text would begin without its space.
        return text if text.startswith(hidden[0][1]) else text.lstrip()

    @property
    def _first(self) -> int:
        assert self.first is not None
        return self.first

    def _words(self, count: int) -> list[str]:
        words = self.maker.words
        if not self.maker.haystack.endless:
            return words[self._first : self._first + count]
        first = self._first % len(words)
        return list(itertools.islice(itertools.cycle(words), first, first + count))

    def _words_for(self, first: int, tokens: int) -> int:
        """How many words from the given one on have so many tokens, about; 0 when the haystack ends."""
        upto = self.maker.upto
        size = len(upto) - 1
        if self.maker.haystack.endless:
            rounds, rest = divmod(upto[first % size] + tokens, upto[-1])
            return max(1, rounds * size + bisect.bisect_left(upto, rest) - first % size)
        return max(0, min(bisect.bisect_left(upto, upto[min(first, size)] + tokens), size) - first)

    def _words_within(self, tokens: int) -> int:
        """How many words at the end have at most so many tokens, about."""
        upto, size = self.maker.upto, len(self.maker.words)
        dropped = 0
        while dropped < self.count:
            at = (self._first + self.count - dropped - 1) % size
            tokens -= upto[at + 1] - upto[at]
            if tokens < 0:
                break
            dropped += 1
        return dropped

    def _prompt(self, text: str, ids: list[int], target: str, parts: Sequence[str], depths: Sequence[float]) -> Prompt:
        maker = self.maker
        asked = maker.encode(text)
        if ids[: len(asked)] != asked or len(asked) == len(ids):
            raise ValueError("this tokenizer merges the answer with the question: the answer cannot be scored with it")
        ends, said, question = [], "", text[-200:]
        for part in parts[:-1]:
            said += f", {part}" if said else f" {part}"
            ends.append(len(maker.encode(question + said)) - len(maker.encode(question)))
        ends.append(len(ids) - len(asked))
        return Prompt(text, target, tuple(ids), ends[-1], tuple(parts), tuple(ends), tuple(depths))
