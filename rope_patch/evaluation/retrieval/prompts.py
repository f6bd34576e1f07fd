"""Makes retrieval prompts as text whose length in a tokenizer's tokens is exact. No model is needed for it."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rope_patch.evaluation.retrieval.haystack import DEFAULT_HAYSTACK, Haystack
from rope_patch.evaluation.tasks import TASKS, Draw, Question, Task
from rope_patch.texts.documents import prefix_ids


@dataclass(frozen=True)
class Prompt:
    """One question with its answer, as text and as tokens.

    Attributes:
        text: the text that the model is given; the answer follows it.
        target: the answer as it continues the text. It begins with the token that holds the first character of the
            value; a space that is a token of its own therefore stands at the end of ``text``.
        ids: token ids of text and answer together, beginning with the special tokens.
        answer: number of tokens of the answer, which are the last ones of ``ids``.
        parts: strings that the answer must give: a single one, or one for each needle.
        ends: end of each part within the answer [tokens].
        depths: depth of the needle that each part is from: 0 is the start, and 1 is just before the question.
        beyond: number of tokens of a wrong answer that are generated beyond those of the right one.
    """

    text: str
    target: str
    ids: tuple[int, ...]
    answer: int
    parts: tuple[str, ...]
    ends: tuple[int, ...]
    depths: tuple[float, ...]
    beyond: int = 0

    @property
    def length(self) -> int:
        """Length of the prompt with all tokens that may be generated."""
        return len(self.ids) + self.beyond


def words_and_sizes(tokenizer: Any, text: str) -> tuple[list[str], list[int]]:
    """Return the words of a text, each with the space before it, and the number of tokens of each.

    Words joined again are the text itself. The numbers are estimates: a tokenizer may merge neighbouring words.
    """
    words = re.findall(r"\s*\S+", text)
    # A text repeats most of its words, and each different one is tokenised once.
    different = list(dict.fromkeys(words))
    coded = tokenizer(different, add_special_tokens=False, verbose=False)["input_ids"]
    size = dict(zip(different, map(len, coded), strict=True))
    return words, [size[word] for word in words]


class PromptMaker:
    """Makes prompts for a tokenizer and a haystack.

    Lengths are exact: the whole prompt is tokenised, and the haystack is cut at its end, first by words and then by
    characters, until the prompt has the number of tokens that was asked for. Any program that tokenises the text gets
    the same tokens. If a task brings a text of its own, as many whole pieces of it as fit are taken, and words of the
    haystack before the question make up the exact length.

    Args:
        tokenizer: the tokenizer that the lengths are counted with.
        haystack: the text that the needles are hidden in.
        prefix: ids of the special tokens in front of each prompt; by default the beginning-of-sequence token if there
            is one, and none in a chat.
        frame: the text that a chat template writes before and after the user's message, as
            :func:`~rope_patch.evaluation.retrieval.chat_template.chat_frame` returns it: the text and the question are
            then that message, the answer begins in the assistant's turn, and the special tokens are those of the
            template. None for plain text.

    Raises:
        ValueError: the haystack has no text.
    """

    def __init__(
        self,
        tokenizer: Any,
        haystack: str | Path | Haystack = DEFAULT_HAYSTACK,
        *,
        prefix: Sequence[int] | None = None,
        frame: tuple[str, str] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.haystack = Haystack.of(haystack)
        self.frame = frame
        if prefix is None:
            prefix = prefix_ids(tokenizer) if frame is None else ()
        self.prefix = tuple(prefix)
        text = self.haystack.text
        if self.haystack.endless:  # a copy of the text follows the one before it after a space
            text = f" {text.lstrip()}"
        self.words, self.sizes = words_and_sizes(tokenizer, text)
        self._made: dict[tuple[Any, ...], list[Prompt]] = {}

    @functools.cached_property
    def essays(self) -> PromptMaker:
        """The maker for tasks that need a text with content, the built-in one where the haystack is noise; in a line.

        RULER, too, makes one space of all white space.
        """
        haystack = Haystack.of("builtin") if self.haystack.endless else self.haystack
        text = " ".join(haystack.text.split())
        return PromptMaker(self.tokenizer, Haystack(text, haystack.name), prefix=self.prefix, frame=self.frame)

    def haystack_of(self, task: str) -> Haystack:
        """Return the haystack of a task's prompts."""
        return self.essays.haystack if TASKS[task].essay else self.haystack

    def prompts(
        self, task: str, length: int, depths: Sequence[float], *, seed: int = 0, sample: int = 0
    ) -> list[Prompt]:
        """Return the prompts of one haystack: one for each depth, or a single one for all needles of a joined task.

        They are made once, for evaluations of several models.

        Args:
            task: the name of a :class:`~rope_patch.evaluation.tasks.Task`.
            length: length of the prompt with its answer, or with all tokens that the task generates [tokens].
            depths: depths of the needles, each in [0, 1].
            seed: seed of the values, the names and the places in the haystack.
            sample: number of the haystack; each has other values and another place.

        Raises:
            ValueError: the task is unknown, a depth is outside [0, 1], the length has no room for the task, the
                haystack is too short, or the tokenizer merges the answer with the question.
        """
        kind = TASKS.find(task)
        key = (kind, length, tuple(depths), seed, sample)
        if key not in self._made:
            maker = self.essays if kind.essay else self
            self._made[key] = maker._make(*key)
        return self._made[key]

    def _make(self, kind: Task, length: int, depths: Sequence[float], seed: int, sample: int) -> list[Prompt]:
        for depth in depths:
            if not 0 <= depth <= 1:
                raise ValueError(f"depth must be in [0, 1], got {depth}")
        if not depths:
            raise ValueError("depths is empty")
        # "single" is the mode that tasks had when there were several; without it all prompts would change.
        rng = random.Random(f"{seed}/{kind.name}/single/{length}/{sample}")
        start = rng.random()
        questions = kind.questions(sorted(depths), Draw(self.tokenizer, rng, length, sample))
        fit = _Fit(self, kind, length, start, questions)
        prompts = [fit(question) for question in questions]
        if kind.joined:
            return prompts
        by_depth = dict(zip(sorted(depths), prompts, strict=True))
        return [by_depth[depth] for depth in depths]

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, beginning with the special tokens."""
        return [*self.prefix, *self.tokens_of(text)]

    def tokens_of(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def render(self, body: str, answer_prefix: str) -> str:
        """Return the text of a prompt from its body and the beginning of its answer, in the chat template if any."""
        if self.frame is None:
            return body + answer_prefix
        before, after = self.frame
        # Many chat templates strip the message; stripped here, the text is what the template would give.
        return before + body.strip() + after + answer_prefix.lstrip()

    def divide(self, text: str, ids: list[int], question: Question) -> Prompt:
        """Return a prompt, divided where the answer's value begins, or before its space if that is in the same token.

        Args:
            text: text of the prompt, which the target of the question follows.
            ids: token ids of both.
            question: the question that is asked.

        Raises:
            ValueError: the tokenizer merges the answer with the question.
        """
        target = question.target
        # The prompt must be tokenised alike with and without the answer: otherwise a model would be asked with other
        # tokens than those it is scored on. Tokens depend on the text near them, so that its end is enough to see it.
        for spaces in (1, 0):
            shown = text + target[:spaces]
            asked = self.encode(shown[-CONTEXT:])
            answered = self.encode(shown[-CONTEXT:] + target[spaces:])
            if answered[: len(asked)] == asked and len(asked) < len(answered):
                break
        else:
            raise ValueError("this tokenizer merges the answer with the question: the answer cannot be scored with it")
        ends = []
        for count in range(1, len(question.parts)):
            answer = question.answer(count)[spaces:]
            ends.append(len(self.encode(shown[-CONTEXT:] + answer)) - len(asked))
        ends.append(len(answered) - len(asked))
        return Prompt(
            text=shown,
            target=target[spaces:],
            ids=tuple(ids),
            answer=ends[-1],
            parts=question.parts,
            ends=tuple(ends),
            depths=question.depths,
        )


END_OF_SENTENCE = re.compile(r"(?<! Mr)(?<! Mrs)(?<! Dr)(?<! St)[.!?][\"')”’_]*$")
CONTEXT = 200
"""Number of characters at the end of a prompt by which the tokens of its answer are counted."""
STARTS = 40
"""Number of words at which a prompt may begin, if the haystack from the first of them on cannot be cut to fit."""
KEPT = 16
"""Number of texts whose tokens are kept while the prompts of a haystack are fitted."""
ESTIMATES = 10
"""Number of estimates of the last word; the tokens of each text correct the next one, so that a few suffice."""


class _Fit:
    """Fits the prompts of one haystack to the exact length, all around the same part of the haystack's text.

    If the questions bring a text of their own, its pieces take the place of the haystack's words, and words of the
    haystack follow it up to the exact length.

    Args:
        maker: the maker of the prompts.
        task: the task.
        length: length of prompt and answer together [tokens].
        start: where in the haystack the text begins, in [0, 1).
        questions: the questions of the haystack.

    Raises:
        ValueError: the length has no room for the questions, or the haystack is too short.
    """

    def __init__(
        self, maker: PromptMaker, task: Task, length: int, start: float, questions: Sequence[Question]
    ) -> None:
        self.maker = maker
        # The tokens of an answer depend on the end of the prompt alone.
        answers = {question: maker.divide(question.answer_prefix, [], question).answer for question in questions}
        self.beyond = {question: max(0, task.generated - answer) for question, answer in answers.items()}
        self.length = length
        self._encoded = functools.lru_cache(maxsize=KEPT)(self._encode_with)  # tokenizing a long prompt takes the time
        self.words = maker.words
        sizes = maker.sizes
        if maker.haystack.endless:
            copies = 4 + 2 * length // sum(sizes)
            self.words = copies * self.words
            sizes = copies * sizes
        self.tokens_before = [0, *itertools.accumulate(sizes)]
        self.context = questions[0].context
        self.size = 0
        self.pieces: Sequence[str] = () if self.context is None else self.context(0)
        excess = max(map(self._excess, questions))
        if excess > 0:
            raise ValueError(
                f"a prompt of {task.name} needs at least {length + excess} tokens with this tokenizer, got {length}: "
                "give longer lengths, or leave this task out"
            )
        if self.context is not None:
            self._fill(self.context, questions)
        self.first = self._place(start, -self._excess(questions[0]))
        self.cut: list[str] = []  # the words of the haystack that fitted the last prompt

    def _fill(self, context: Callable[[int], Sequence[str]], questions: Sequence[Question]) -> None:
        """Take as many pieces of the questions' own text as leave room for every prompt."""
        # The longest question decides, so that all prompts of a haystack have the same pieces.
        longest = max(questions, key=self._excess)

        def excess(size: int) -> int:
            self.pieces = context(size)
            return self._excess(longest)

        before, size, each = 0, 8, 1.0
        over = excess(before)
        for _ in range(4):  # pieces have about the same number of tokens, so that few estimates come near
            now = excess(size)
            if size != before:
                each = max(1.0, (now - over) / (size - before))
            before, over = size, now
            size = max(0, size - math.floor(now / each))
        while excess(size) > 0 and size > 0:
            size -= 1
        while excess(size + 1) <= 0 and context(size) != context(size + 1):
            size += 1
        self.size = size
        self.pieces = context(size)

    def __call__(self, question: Question) -> Prompt:
        """Return the prompt of a question."""
        if self._excess(question, self.cut) != 0:  # the words of the last prompt mostly fit
            self.cut = self._fitting_cut(question)
        prompt = self.maker.divide(*self._encode(question, self.cut), question)
        return replace(prompt, beyond=self.beyond[question])

    def _fitting_cut(self, question: Question) -> list[str]:
        """Return the words of the haystack with which a prompt has the exact length."""
        while True:
            for first in range(self.first, min(self.first + STARTS, len(self.words))):
                cut = self._cut(question, first)
                if cut is not None:
                    self.first = first  # later depths begin at the same word
                    return cut
            if self.context is None or self.size == 0:
                raise ValueError(
                    f"no cut of the haystack gives exactly {self.length} tokens with this tokenizer: try another length"
                )
            self.size -= 1  # there is more room with a piece less, into which more cuts fit
            self.pieces = self.context(self.size)

    def _place(self, start: float, room: int) -> int:
        """Return the index of the haystack's word where the prompt begins: random, with ``room`` tokens after it."""
        if self.maker.haystack.endless:
            return int(start * len(self.maker.words))
        total = self.tokens_before[-1]
        # Some words are kept in reserve, because a text that cannot be cut to the exact length begins a word later.
        reserve = 2 * STARTS
        if total < room + reserve:
            raise ValueError(f"the haystack has {total} tokens, {room} and some to spare are needed: give a longer one")
        last = bisect.bisect_right(self.tokens_before, total - room) - 1 - reserve
        return int(start * (max(last, 0) + 1))

    def _cut(self, question: Question, first: int) -> list[str] | None:
        """Return the words from ``first`` on with which a prompt has the exact length; None if no cut of them fits."""
        end = first
        for _ in range(ESTIMATES):
            words = self.words[first:end]
            excess = self._excess(question, words)
            if excess == 0:
                return words
            nearer = max(first, bisect.bisect_left(self.tokens_before, self.tokens_before[end] - excess))
            if nearer > len(self.words) or (excess > 0 and not words):
                return None
            if nearer == end:  # the last word has more tokens than there are too many: its first characters may fit
                *whole, last = words
                cuts = ([*whole, last[:size]] for size in range(len(last) - 1, 0, -1))
                return next((cut for cut in cuts if self._excess(question, cut) == 0), None)
            end = nearer
        return None

    def _excess(self, question: Question, words: Sequence[str] = ()) -> int:
        """Return how many tokens more than the length a prompt has with these words of the haystack."""
        return len(self._encode(question, words)[1]) + self.beyond[question] - self.length

    def _encode(self, question: Question, words: Sequence[str]) -> tuple[str, list[int]]:
        """Return the text of a prompt with these words of the haystack, and the ids of it and its answer."""
        return self._encoded(question, tuple(self.pieces), tuple(words))

    def _encode_with(self, question: Question, pieces: Sequence[str], words: Sequence[str]) -> tuple[str, list[int]]:
        surrounding = words
        after: Sequence[str] = ()
        if question.context is not None:
            surrounding = pieces
            after = words
        parts = list[str]()
        at = 0
        for depth, needle in question.hidden:
            place = round(depth * len(surrounding))
            if question.between_sentences:
                while place > at and not END_OF_SENTENCE.search(surrounding[place - 1]):
                    place -= 1
            parts += [*surrounding[at:place], needle]
            at = place
        inside = "".join([*parts, *surrounding[at:]])
        if question.opening:
            inside = inside.lstrip()
        body = "".join([question.opening, inside, question.closing, *after, question.text])
        # A needle at the start keeps the space before it, so that it has the same tokens at every depth.
        if not (question.hidden and body.startswith(question.hidden[0][1])):
            body = body.lstrip()
        text = self.maker.render(body, question.answer_prefix)
        return text, self.maker.encode(text + question.target)
