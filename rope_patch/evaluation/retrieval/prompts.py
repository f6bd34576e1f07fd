"""Makes retrieval prompts as text whose length in a tokenizer's tokens is exact. No model is needed for it."""

from __future__ import annotations

import bisect
import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_patch.evaluation.retrieval.haystack import DEFAULT_HAYSTACK, Haystack
from rope_patch.evaluation.tasks import TASKS, Draw, Question
from rope_patch.evaluation.texts.documents import prefix_ids


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
        hidden: depth and text of every needle, by rising depth.
        question: text of the question; a chat template may have removed its outer spaces.
    """

    text: str
    target: str
    ids: tuple[int, ...]
    answer: int
    parts: tuple[str, ...]
    ends: tuple[int, ...]
    depths: tuple[float, ...]
    hidden: tuple[tuple[float, str], ...] = ()
    question: str = ""


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
        turns: the text that a chat template writes before and after the user's message, as
            :func:`~rope_patch.evaluation.retrieval.chat_template.chat_turns` returns it: the text and the question are
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
        turns: tuple[str, str] | None = None,
    ) -> None:
        self.tokenizer, self.haystack, self.turns = tokenizer, Haystack.of(haystack), turns
        if prefix is None:
            prefix = prefix_ids(tokenizer) if turns is None else ()
        self.prefix = tuple(prefix)
        # Each word keeps the space before it, so that words joined again are the text itself.
        self.words: list[str] = re.findall(r"\s*\S+", self.haystack.text)
        if self.haystack.endless:  # a copy of the text follows the one before it after a space
            self.words[0] = f" {self.words[0].lstrip()}"
        # A text repeats most of its words, and each different one is tokenised once.
        different = list(dict.fromkeys(self.words))
        coded = tokenizer(different, add_special_tokens=False, verbose=False)["input_ids"]
        size = dict(zip(different, map(len, coded), strict=True))
        # Number of tokens before each word. It is an estimate, because a tokenizer may merge neighbouring words.
        self.tokens_before: list[int] = [0, *itertools.accumulate(size[word] for word in self.words)]

    def prompts(
        self, task: str, length: int, depths: Sequence[float], *, seed: int = 0, sample: int = 0
    ) -> list[Prompt]:
        """Return the prompts of one haystack: one for each depth, or a single one for all needles of a joined task.

        Args:
            task: the name of a :class:`~rope_patch.evaluation.tasks.Task`.
            length: length of prompt and answer together [tokens].
            depths: depths of the needles, each in [0, 1].
            seed: seed of the values, the names and the places in the haystack.
            sample: number of the haystack; each has other values and another place.

        Raises:
            ValueError: the task is unknown, a depth is outside [0, 1], the length has no room for the task, the
                haystack is too short, or the tokenizer merges the answer with the question.
        """
        kind = TASKS.find(task)
        for depth in depths:
            if not 0 <= depth <= 1:
                raise ValueError(f"depth must be in [0, 1], got {depth}")
        if not depths:
            raise ValueError("depths is empty")
        # "single" is the mode that tasks had when there were several; without it all prompts would change.
        rng = random.Random(f"{seed}/{task}/single/{length}/{sample}")
        fit = _Fit(self, task, length, start=rng.random())
        draw = Draw(self.tokenizer, rng, length)
        questions = kind.questions(sorted(depths), draw)
        fit.share(questions)
        prompts = [fit(question) for question in questions]
        if kind.joined:
            return prompts
        ranks = {i: rank for rank, i in enumerate(sorted(range(len(depths)), key=lambda i: depths[i]))}
        return [prompts[ranks[i]] for i in range(len(depths))]

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, beginning with the special tokens."""
        return [*self.prefix, *self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]

    def render(self, body: str, answer_prefix: str) -> str:
        """Return the text of a prompt from its body and the beginning of its answer, in the chat template if any."""
        if self.turns is None:
            return body + answer_prefix
        before, after = self.turns
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
        # tokens than those it is scored on.
        for spaces in range(len(target) - len(target.lstrip()), -1, -1):
            shown = text + target[:spaces]
            answer_start = target[spaces:]
            prompt_ids = self.encode(shown)
            if ids[: len(prompt_ids)] == prompt_ids and len(prompt_ids) < len(ids):
                break
        else:
            raise ValueError("this tokenizer merges the answer with the question: the answer cannot be scored with it")
        ends = []
        answer = ""
        # The end of the text is enough context to count the tokens of a part, and spares tokenising the whole prompt
        # for each.
        context = shown[-200:]
        for part in question.parts[:-1]:
            if answer:
                answer += f", {part}"
            else:
                answer = answer_start[: answer_start.index(part)] + part
            ends.append(len(self.encode(context + answer)) - len(self.encode(context)))
        ends.append(len(ids) - len(prompt_ids))
        return Prompt(
            text=shown,
            target=answer_start,
            ids=tuple(ids),
            answer=ends[-1],
            parts=question.parts,
            ends=tuple(ends),
            depths=question.depths,
            hidden=question.hidden,
            question=question.text,
        )


class CachedPromptMaker(PromptMaker):
    """Makes each prompt once, for evaluations of several models; its arguments are those of PromptMaker."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._made: dict[tuple[Any, ...], list[Prompt]] = {}

    def prompts(
        self, task: str, length: int, depths: Sequence[float], *, seed: int = 0, sample: int = 0
    ) -> list[Prompt]:
        """Return the prompts of one haystack, as :meth:`PromptMaker.prompts` does."""
        key = (task, length, tuple(depths), seed, sample)
        if key not in self._made:
            self._made[key] = super().prompts(task, length, depths, seed=seed, sample=sample)
        return self._made[key]


class _Fit:
    """Fits the prompts of one haystack to the exact length, all around the same part of the haystack's text.

    The number of words that fitted one prompt is the first guess for the next. If a question brings a text of its own,
    its pieces take the place of the haystack's words, and words of the haystack follow it up to the exact length.
    """

    tries = 40

    def __init__(self, maker: PromptMaker, task: str, length: int, start: float) -> None:
        self.maker, self.task, self.length, self.start = maker, task, length, start
        self.first: int | None = None
        self.count = self.trim = 0
        self.size = 0  # number of pieces of the question's own text
        self.pieces: Sequence[str] = ()

    def share(self, questions: Sequence[Question]) -> None:
        """Find how many pieces of their own text fit into every prompt of these questions."""
        if questions[0].context is None:
            return
        # The longest question decides, so that all prompts of a haystack have the same pieces.
        sizes = [self._tokens_without_haystack(question, 0) for question in questions]
        least, longest = max(sizes), questions[sizes.index(max(sizes))]
        low, below, high, above = 0, least, 0, 0  # a number of pieces that fits, one that does not, and their tokens
        size, ended = 1, None
        while least <= self.length and high - low != 1:
            try:
                taken, error = self._tokens_without_haystack(longest, size), None
            except ValueError as too_many:  # there are fewer pieces than this, which may suffice
                taken, error = 2 * self.length, too_many
            if taken <= self.length:
                low, below = size, taken
            else:
                high, above, ended = size, taken, error
            if high:  # tokens are nearly linear in the number of pieces: interpolate
                size = min(high - 1, max(low + 1, low + (high - low) * (self.length - below) // (above - below)))
            else:
                size = max(low + 1, min(4 * low, low * (self.length - least) // max(1, below - least) + 1))
        if ended is not None:
            raise ended
        self.size = low

    def __call__(self, question: Question, fewer: int = 3) -> Prompt:
        """Return the prompt of a question, with up to ``fewer`` pieces less where no words fit the room."""
        taken = self._tokens_without_haystack(question, self.size)
        while taken > self.length and self.size:  # the longest question had room for them
            self.size -= 1
            taken = self._tokens_without_haystack(question, self.size)
        room = self.length - taken
        if room < 0:
            raise ValueError(
                f"a prompt of {self.task} needs at least {taken} tokens with this tokenizer, got {self.length}: give "
                "longer lengths, or leave this task out"
            )
        if self.first is None:
            self.first = self._place(room)
        for _ in range(self.tries):
            fitted = self._exact(question, room)
            if fitted is not None:
                return self.maker.divide(*fitted, question)
            self.first, self.count, self.trim = self.first + 1, 0, 0  # later depths begin at the same word
        if self.size and fewer:  # without its last piece there is more room, into which more cuts fit
            self.size, self.first = self.size - 1, None
            return self(question, fewer - 1)
        raise ValueError(f"found no haystack of exactly {room} tokens with this tokenizer: try another length")

    def _tokens_without_haystack(self, question: Question, size: int) -> int:
        """Take ``size`` pieces of the question's own text, and return the tokens of the prompt without haystack."""
        self.pieces = () if question.context is None else question.context(size)
        maker = self.maker
        return len(maker.encode(maker.render(self._body(question, []), question.answer_prefix) + question.target))

    def _place(self, room: int) -> int:
        """Return the index of the haystack's word where the prompt begins: random, with ``room`` tokens after it."""
        tokens_before = self.maker.tokens_before
        if self.maker.haystack.endless:
            return int(self.start * (len(tokens_before) - 1))
        # Some words are kept in reserve, because a text that cannot be cut to the exact length begins a word later.
        last = bisect.bisect_right(tokens_before, tokens_before[-1] - room) - 1 - 2 * self.tries
        if tokens_before[-1] < room or (room and last < 0 and tokens_before[-1] < room + 2 * self.tries):
            raise ValueError(
                f"the haystack has {tokens_before[-1]} tokens, {room} and some to spare are needed: give a longer one"
            )
        return int(self.start * (max(last, 0) + 1))

    def _exact(self, question: Question, room: int) -> tuple[str, list[int]] | None:
        """Return a text that has the exact length with its answer, and its ids; None if no cut of these words fits."""
        maker = self.maker
        if self.count == 0 and room:
            self.count = self._words_for(self._first, room)
        for _ in range(self.tries):
            text = self._text(question, self.trim)
            ids = maker.encode(text + question.target)
            excess = len(ids) - self.length
            if excess == 0:
                return text, ids
            if self.trim:  # the cut that fitted the last prompt does not fit this one
                self.trim = 0
            elif excess < 0:
                more = self._words_for(self._first + self.count, -excess)
                if more == 0:
                    return None
                self.count += more
            elif dropped := self._words_within(excess):
                self.count -= dropped
            else:
                trim = self._trim(question, excess)
                if trim is None:
                    return None
                self.trim = trim
        return None

    def _trim(self, question: Question, excess: int) -> int | None:
        """Return how many characters to cut from the last word to remove ``excess`` tokens; None if no number does.

        Only the end of the text is tokenised for it, because a cut does not change tokens that are far before it.
        """
        maker = self.maker
        whole = self._text(question, 0)
        behind = len(self.maker.render(question.text, question.answer_prefix))
        start = max(0, len(whole) - behind - sum(len(needle) for _, needle in question.hidden) - 300)
        size = len(maker.encode(whole[start:] + question.target))
        word = self._words(self.count)[-1] if self.count else ""
        for trim in range(1, len(word)):
            if size - len(maker.encode(self._text(question, trim)[start:] + question.target)) == excess:
                return trim
        return None

    def _text(self, question: Question, trim: int) -> str:
        words = self._words(self.count)
        if words and trim:
            words[-1] = words[-1][:-trim]
        return self.maker.render(self._body(question, words), question.answer_prefix)

    def _body(self, question: Question, words: Sequence[str]) -> str:
        surrounding = words
        after: Sequence[str] = ()
        if question.context is not None:
            surrounding = self.pieces
            after = words
        pieces = [question.opening]
        at = 0
        for depth, needle in question.hidden:
            place = round(depth * len(surrounding))
            pieces += [*surrounding[at:place], needle]
            at = place
        body = "".join([*pieces, *surrounding[at:], question.closing, *after, question.text])
        # A needle at the start keeps the space before it, so that it has the same tokens at every depth.
        if question.hidden and body.startswith(question.hidden[0][1]):
            return body
        return body.lstrip()

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
        """Return about how many words from ``first`` on have this number of tokens; 0 at the end of the haystack."""
        tokens_before = self.maker.tokens_before
        size = len(tokens_before) - 1
        if self.maker.haystack.endless:
            rounds, remaining = divmod(tokens_before[first % size] + tokens, tokens_before[-1])
            return max(1, rounds * size + bisect.bisect_left(tokens_before, remaining) - first % size)
        return max(0, min(bisect.bisect_left(tokens_before, tokens_before[min(first, size)] + tokens), size) - first)

    def _words_within(self, tokens: int) -> int:
        """Return about how many of the last words have at most this number of tokens together."""
        tokens_before, size = self.maker.tokens_before, len(self.maker.words)
        dropped = 0
        while dropped < self.count:
            at = (self._first + self.count - dropped - 1) % size
            tokens -= tokens_before[at + 1] - tokens_before[at]
            if tokens < 0:
                break
            dropped += 1
        return dropped
