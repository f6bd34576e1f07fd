"""Retrieval prompts as text, of an exact length in tokens of the model at hand. Nothing here touches a model."""

from __future__ import annotations

import bisect
import datetime
import itertools
import random
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from rope_patch.evaluation.documents import prefix_ids
from rope_patch.evaluation.haystack import HAYSTACK, Haystack
from rope_patch.evaluation.tasks import Draw, Question, find_task


@dataclass(frozen=True)
class Prompt:
    """One question with its answer, as text and in tokens of the model at hand.

    Attributes:
        text: what the model is given; the answer follows it.
        target: the answer, as it continues the text. It begins with the last token that begins at or before its first
            character: a space that is a token of its own stands at the end of the text.
        ids: both, special tokens in front included [tokens of this tokenizer].
        answer: how many of the last ids are the answer.
        parts: the strings looked for in an answer: one, or one per needle.
        ends: where each part ends within the answer [tokens].
        depths: of the needle each part is from, 0 for the start and 1 for just before the question.
        hidden: depth and text of every needle, by rising depth.
        question: what is asked; in a chat its outer spaces may be missing from the text.
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

    Lengths are exact: the whole prompt is tokenised, and the haystack is cut, by words and then by characters at its
    end, until the number of tokens is the one asked for. So the text means the same to any program that reads it.

    Args:
        tokenizer: of the model.
        haystack: what the needles are hidden in.
        bos: as in :func:`~rope_patch.evaluation.documents.prefix_ids`.
        prefix: special tokens in front of each prompt, in place of what ``bos`` says.
        turns: what a chat template writes before and after the user's message, as :func:`chat_turns` returns it: the
            text and the question are then that message, the answer begins in the assistant's turn, and the special
            tokens are those of the template. None for plain text.

    Raises:
        ValueError: no text, or ``bos=True`` without such a token.
    """

    def __init__(
        self,
        tokenizer: Any,
        haystack: str | Path | Haystack = HAYSTACK,
        bos: bool | None = None,
        *,
        prefix: Sequence[int] | None = None,
        turns: tuple[str, str] | None = None,
    ) -> None:
        self.tokenizer, self.haystack, self.turns = tokenizer, Haystack.of(haystack), turns
        if prefix is None:
            prefix = prefix_ids(tokenizer, bos) if turns is None else ()
        self.prefix = tuple(prefix)
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
            task: the name of a :class:`~rope_patch.evaluation.tasks.Task`.
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
        fit = _Fit(self, length, start=rng.random())
        prompts = [fit(question) for question in kind.questions(sorted(depths), mode, Draw(self.tokenizer, rng))]
        if kind.joined:
            return prompts
        ranks = {i: rank for rank, i in enumerate(sorted(range(len(depths)), key=lambda i: depths[i]))}
        return [prompts[ranks[i]] for i in range(len(depths))]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with the special tokens in front."""
        return [*self.prefix, *self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]

    def render(self, body: str, answer_prefix: str) -> str:
        """Return the text of a prompt: what is asked, and how the answer begins."""
        if self.turns is None:
            return body + answer_prefix
        before, after = self.turns
        return before + body.strip() + after + answer_prefix.lstrip()


class CachedPromptMaker(PromptMaker):
    """Makes each prompt once: for an evaluation, which asks the same of every model. Arguments as in PromptMaker."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._made: dict[tuple[Any, ...], list[Prompt]] = {}

    def prompts(
        self, task: str, length: int, depths: Sequence[float], *, mode: str = "single", seed: int = 0, sample: int = 0
    ) -> list[Prompt]:
        """Return the prompts of one haystack, as :meth:`PromptMaker.prompts` does."""
        key = (task, length, tuple(depths), mode, seed, sample)
        if key not in self._made:
            self._made[key] = super().prompts(task, length, depths, mode=mode, seed=seed, sample=sample)
        return self._made[key]


class _Fit:
    """Fits prompts around one stretch of the haystack. What fitted the last prompt is where the next one starts."""

    tries = 40

    def __init__(self, maker: PromptMaker, length: int, start: float) -> None:
        self.maker, self.length, self.start = maker, length, start
        self.first: int | None = None
        self.count = self.trim = 0

    def __call__(self, question: Question) -> Prompt:
        maker = self.maker
        needles = "".join(needle for _, needle in question.hidden)
        bare = maker.encode(maker.render(needles + question.text, question.answer_prefix) + question.target)
        room = self.length - len(bare)
        if room < 0:
            raise ValueError(f"this prompt needs at least {len(bare)} tokens with this tokenizer, got {self.length}")
        if self.first is None:
            self.first = self._place(room)
        for _ in range(self.tries):
            fitted = self._exact(question, room)
            if fitted is not None:
                return self._prompt(*fitted, question)
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

    def _exact(self, question: Question, room: int) -> tuple[str, list[int]] | None:
        """The text that has the exact length with its answer, and its ids; None when this stretch gives none."""
        maker = self.maker
        if self.count == 0 and room:
            self.count = self._words_for(self._first, room)
        for _ in range(self.tries):
            text = self._text(question, self.trim)
            ids = maker.encode(text + question.target)
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
                trim = self._trim(question, excess)
                if trim is None:
                    return None
                self.trim = trim
        return None

    def _trim(self, question: Question, excess: int) -> int | None:
        """How many characters less of the last word make so many tokens less; None if no number does.

        Only the end of the text is tokenised for it: what comes long before the cut does not see it.
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
        pieces, at = [], 0
        for depth, needle in question.hidden:
            place = round(depth * len(words))
            pieces += [*words[at:place], needle]
            at = place
        body = "".join([*pieces, *words[at:], question.text])
        # A needle is written alike at every depth, at the start too, where a text would begin without its space.
        body = body if body.startswith(question.hidden[0][1]) else body.lstrip()
        return self.maker.render(body, question.answer_prefix)

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

    def _prompt(self, text: str, ids: list[int], question: Question) -> Prompt:
        """Cut the text where the answer's value begins, or before the space that belongs to its first token."""
        maker, target = self.maker, question.target
        for spaces in range(len(target) - len(target.lstrip()), -1, -1):
            shown, rest = text + target[:spaces], target[spaces:]
            asked = maker.encode(shown)
            if ids[: len(asked)] == asked and len(asked) < len(ids):
                break
        else:
            raise ValueError("this tokenizer merges the answer with the question: the answer cannot be scored with it")
        ends, answer, context = [], "", shown[-200:]
        for part in question.parts[:-1]:
            answer += f", {part}" if answer else rest[: rest.index(part)] + part
            ends.append(len(maker.encode(context + answer)) - len(maker.encode(context)))
        ends.append(len(ids) - len(asked))
        return Prompt(
            *(shown, rest, tuple(ids), ends[-1], question.parts, tuple(ends), question.depths),
            hidden=question.hidden,
            question=question.text,
        )


CHAT_TEMPLATES = ("auto", "on", "off")

DATE = datetime.datetime(2024, 7, 26, 12)
"""The day that prompts state where a chat template prints today's date: the one that Llama's template falls back on."""

DATE_CODES = "aAwdbBmyYHIpMSjUWu"
"""Codes of ``strftime`` that a template may ask for."""


def chat_turns(tokenizer: Any, chat_template: str = "on") -> tuple[str, str] | None:
    """Return what a tokenizer's chat template writes before and after a user's message, the assistant's turn begun.

    A template that prints today's date (``strftime_now``) prints :data:`DATE`: prompts do not change with the day, so
    that a run that goes on tomorrow asks the same. Transformers gives templates the clock itself and takes no other
    function, so a macro of that name is put in front of the template.

    Args:
        tokenizer: of the model.
        chat_template: ``"on"``, ``"off"`` for None, or ``"auto"`` for None where there is no template.

    Raises:
        ValueError: no template though one is asked for, or one that does not show the message as it is.
    """
    missing = getattr(tokenizer, "chat_template", None) is None
    if chat_template == "off" or (missing and chat_template == "auto"):
        return None
    if missing:
        raise ValueError(
            "this tokenizer has no chat template: leave the chat out (chat_template='off', --chat-template off), or "
            "load the tokenizer of an instruction-tuned model"
        )
    try:
        options = {"tokenize": False, "add_generation_prompt": True, **_dated(tokenizer.chat_template)}
        return turns_of(lambda chat: str(tokenizer.apply_chat_template(chat, **options)))
    except (ValueError, TemplateError) as error:
        message = f"the chat template of this tokenizer cannot be used: {error}"
        if chat_template == "on":
            raise ValueError(f"{message}. chat_template='off' (--chat-template off) leaves it out") from error
        warnings.warn(f"{message}. Prompts are plain text", stacklevel=2)
        return None


def _dated(template: str | Mapping[str, str]) -> dict[str, str]:
    """Return the option with which a chat template is rendered at a fixed day; none where it does not ask for one.

    Args:
        template: of a tokenizer; of several by name the one called ``"default"`` is rendered.
    """
    text = template if isinstance(template, str) else template.get("default", "")
    if "strftime_now" not in text:
        return {}
    # %-d, as glibc writes it, is a day without a zero in front.
    values = {f"%-{code}": DATE.strftime(f"%{code}").lstrip("0") or "0" for code in "dmHIMSj"}
    values |= {f"%{code}": DATE.strftime(f"%{code}") for code in DATE_CODES}
    filters = "".join(f"|replace({code!r}, {value!r})" for code, value in values.items())
    # The line break goes with the end of the block: the template begins where it would without the macro.
    return {"chat_template": f"{{%- macro strftime_now(format) -%}}{{{{ format{filters} }}}}{{%- endmacro %}}\n{text}"}


def turns_of(render: Callable[[list[dict[str, str]]], str]) -> tuple[str, str]:
    """Return what a chat template writes before and after a user's message.

    Args:
        render: writes a chat as text, the assistant's turn begun.

    Raises:
        ValueError: the message does not appear as it is.
    """
    message = "the message of the user"
    before, shown, after = render([{"role": "user", "content": message}]).partition(message)
    if not shown:
        raise ValueError("it does not show the message of the user as it is written")
    return before, after
