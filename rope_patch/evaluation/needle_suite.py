"""Windows of text with a needle in each: one reading measures their perplexity and asks at every length on the way."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rope_patch.evaluation.finished_work import Resume, finished_work
from rope_patch.evaluation.perplexity.measure import sums_by_position
from rope_patch.evaluation.perplexity.result import Window, sum_up
from rope_patch.evaluation.read_across_processes import read_batches
from rope_patch.evaluation.retrieval.generate_answers import Answer, answer_from, copy_cache
from rope_patch.evaluation.retrieval.measure import RetrievalCell, RetrievalResult, grade, stop_ids
from rope_patch.evaluation.retrieval.prompts import Prompt, PromptMaker
from rope_patch.evaluation.suite import EvalResult, Suite
from rope_patch.evaluation.tasks import TASKS, Draw, Question
from rope_patch.modeling.inputs import check_ids, tensor_hash
from rope_patch.modeling.reader import Reader, losses
from rope_patch.modeling.temporary_modes import in_eval_mode
from rope_patch.options.evaluation import EvalSpec
from rope_patch.runtime.result_cache import key
from rope_patch.texts.documents import Source, TokenDocument

NEEDLE_DEPTH = 0.5
"""Where in the shortest length the needle lies, as a share of it."""
SEARCHED_TOKENS = 32
"""Number of tokens among which the beginning of a word is looked for, where a needle may stand."""


@dataclass(frozen=True, eq=False)
class NeedleWindow:
    """A window of text with a needle, and what is asked about it.

    Attributes:
        window: the text with the needle, up to the last question.
        is_text: (tokens,) bool, the tokens whose loss counts: those of the text.
        question: the question with its answer, in tokens of their own.
    """

    window: Window
    is_text: Tensor
    question: Prompt


class NeedleSuite(Suite):
    """An evaluation that reads each window once, for perplexity and for retrieval.

    A needle lies in each window, in the middle of the shortest length. At every length the question follows the text
    that was read so far, in a copy of the cache, so that it moves away from its needle. The loss of the needle does not
    count. There is one task: tiny models answer the question of one needle with another.

    Args:
        spec: the spec of what is measured, of one task, without its ``samples``, which are the windows, and its
            ``depths``.
        tokenizer: the tokenizer of the models that will be measured.
        text: a text in memory that replaces the spec's.

    Raises:
        ValueError: there is too little text, the task asks for several needles or brings a text of its own, or the
            shortest length has no room for it.
        FileNotFoundError: the file of the text does not exist.
    """

    most_windows = 16

    def __init__(self, spec: EvalSpec, tokenizer: Any, text: Source | None = None) -> None:
        super().__init__(spec, tokenizer, text)
        self.maker = PromptMaker(tokenizer, prefix=())
        (task,) = spec.tasks
        self._lay(task, self.spec.lengths)

    def _lay(self, task: str, lengths: Sequence[int]) -> None:
        """Lay the needle of a task into each window."""
        count = len(self.windows)
        self.task = task
        self.spec = replace(
            self.spec, tasks=(task,), lengths=lengths, windows=count, samples=count, depths=[NEEDLE_DEPTH]
        )
        self.laden = [self._laden(number, window) for number, window in enumerate(self.windows)]
        # The same room in each window, so that all are read up to the same positions.
        self.room = max(len(one.question.ids) for one in self.laden)
        for shorter, longer in itertools.pairwise(self.spec.lengths):
            if longer - shorter <= self.room:
                raise ValueError(f"{longer} tokens are too few beyond {shorter}: give more than {shorter + self.room}")
        # No text stands where a question does: the range before each length ends with it.
        ends = [range(length - self.room, length) for length in self.spec.lengths]
        self.edges = [edge for edge in self.spec.edges if not any(edge in end for end in ends)]

    def asking(self, task: str, lengths: Sequence[int] | None = None) -> NeedleSuite:
        """Return a suite with the same windows, and the needle of another task in them.

        Args:
            task: the name of the task.
            lengths: lengths at which it asks, none longer than the longest of this suite; by default the same [tokens].

        Raises:
            ValueError: the task asks for several needles or brings a text of its own, or a length has no room for it.
        """
        other = copy.copy(self)
        other._lay(task, lengths or self.spec.lengths)
        return other

    def smaller(self, windows: int) -> NeedleSuite:
        """Return a suite of some of the windows.

        The windows of a smaller suite are among those of any larger one, so their results are reused, and they are
        spread over the text too; a single one comes from its middle third, or is the second of two.

        Args:
            windows: number of windows, at least 1 and at most as many as this suite has.
        """
        part = copy.copy(self)
        part.spec = replace(self.spec, windows=windows, samples=windows)
        count = len(self.laden)
        # Sorted by their number with its bits reversed, so that any first few windows are spread over the text.
        bits = max(1, count - 1).bit_length()
        order = sorted(range(count), key=lambda i: f"{i:0{bits}b}"[::-1])
        # The first of them would be the beginning of the text. Of the next two, one is near the middle.
        middle = min(order[1:3], key=lambda i: abs(2 * i - count + 1), default=0)
        order.sort(key=lambda i: i != middle)
        chosen = sorted(order[:windows])
        part.windows = [self.windows[i] for i in chosen]
        part.laden = [self.laden[i] for i in chosen]
        return part

    def _laden(self, number: int, window: TokenDocument) -> NeedleWindow:
        """Return a window with its needle and question, drawn by the seed and the window's name."""
        spec = self.spec
        tokenizer = self.tokenizer
        asked = _question(self.task, Draw(tokenizer, random.Random(f"{spec.seed}/{window.name}")))
        needle = self.maker.encode(asked.hidden[0][1])
        text = asked.text + asked.answer_prefix
        question = self.maker.divide(text, self.maker.encode(text + asked.target), asked)
        first = len(window.prefix)
        tokens = window.ids.tolist()
        room = NEEDLE_DEPTH * (spec.lengths[0] - len(question.ids) - len(needle) - first)
        if room < SEARCHED_TOKENS:
            raise ValueError(f"{spec.lengths[0]} tokens are too few for {self.task}: give longer lengths")
        at = self._word_start(tokens, first + round(room))
        ids = [*tokens[:at], *needle, *tokens[at:]]
        is_text = torch.ones(len(ids), dtype=torch.bool)
        is_text[:first] = False
        # The token behind the needle continues the text before it.
        is_text[at : at + len(needle) + 1] = False
        document = TokenDocument(window.name, torch.tensor(ids), None, window.prefix)
        return NeedleWindow(Window(number, 0, len(ids), 1, document), is_text, question)

    def _word_start(self, ids: list[int], place: int) -> int:
        """Return the first place from here on where a word begins; the place itself if none does soon."""
        for at in range(place, place + SEARCHED_TOKENS):
            before = len(self.tokenizer.decode(ids[at - 1 : at]))
            if self.tokenizer.decode(ids[at - 1 : at + 1])[before:][:1].isspace():
                return at
        return place

    def run(self, model: nn.Module, *, resume: Resume = None) -> EvalResult:
        """Return the scores of a model, which stays in training or eval mode as it was.

        Args:
            model: a causal language model of transformers.
            resume: file (or mapping) in which finished windows are stored, each under a key made of its content.

        Raises:
            ValueError: logits are not finite, or the model does not know some token ids.
            TypeError: the argument is not a model, for example the name of one.
        """
        spec = self.spec
        reader = Reader(model)
        chunk = reader.chunk(spec.longest, spec.chunk)

        def name(item: NeedleWindow, model: str) -> str:
            question = item.question.ids, item.question.answer
            text = tensor_hash(item.window.source.ids), tensor_hash(item.is_text.long())
            return key(
                what="needle window",
                text=text,
                question=question,
                model=model,
                lengths=spec.lengths,
                room=self.room,
                edges=self.edges,
                chunk=chunk,
            )

        for one in self.laden:
            check_ids(one.window.source.ids, reader.vocabulary)
        with in_eval_mode(model):
            pairs = read_batches(
                model,
                ([one] for one in self.laden),
                score=lambda items: [self._read(reader, item, chunk) for item in items],
                name=name,
                tokens=lambda item: spec.longest,
                work=finished_work(model, resume, spec.longest),
            )
            values = [value for _, value in pairs]
        texts = [(item.window, value["text"]) for item, value in zip(self.laden, values, strict=True)]
        perplexity = sum_up(texts, self.edges, window=spec.longest, stride=spec.longest, chunk=chunk)
        answers = [[Answer(**answer) for answer in value["answers"]] for value in values]
        return EvalResult(spec, perplexity, self._retrieval(answers, stop_ids(model, self.tokenizer)))

    def _read(self, reader: Reader, item: NeedleWindow, chunk: int) -> dict[str, Any]:
        """Read a window, and ask at every length."""
        ids = item.window.source.ids
        past = reader.new_cache(self.spec.longest)
        parts = []
        answers = []
        read = 0
        scored = item.is_text[: self.spec.longest - self.room].clone()
        for length in self.spec.lengths:
            stop = length - self.room
            parts.append(losses(reader, ids[None, read:stop], [1], chunk=chunk, cache=lambda: past)[0])
            scored[read] = False  # no state of this part predicts its first token
            read = stop
            prompt = torch.cat([ids[:stop], torch.tensor(item.question.ids)])[None]
            answers += answer_from(reader, [item.question], prompt, stop, copy_cache(past))
        sums = sums_by_position(item.window, torch.cat(parts), scored, self.edges)
        return {"text": sums, "answers": [asdict(answer) for answer in answers]}

    def _retrieval(self, answers: Sequence[Sequence[Answer]], stops: Sequence[int]) -> dict[str, RetrievalResult]:
        """Return the answers of each window, one for each length, graded."""
        spec = self.spec
        task = TASKS[self.task]
        cells = []
        for length, asked in zip(spec.lengths, zip(*answers, strict=True), strict=True):
            samples = []
            for item, answer in zip(self.laden, asked, strict=True):
                samples += grade(self.tokenizer, task, item.question, answer, stops)
            # About there: the needle stands between two words.
            cells.append(RetrievalCell(length, NEEDLE_DEPTH * spec.lengths[0] / length, tuple(samples)))
        result = RetrievalResult(
            self.task,
            tuple(cells),
            spec.seed,
            f"{self.text_name}, a needle in the first {spec.lengths[0]} tokens of each window",
            self.text_sha256,
            self.laden[0].window.source.prefix,
        )
        return {self.task: result}


def _question(task: str, draw: Draw) -> Question:
    """Return the question of a task about one needle that can lie in any text.

    Raises:
        ValueError: the task asks for several needles at once, or brings a text of its own.
    """
    kind = TASKS.find(task)
    (question, *_) = kind.questions((0.5,), draw)
    if kind.joined or question.context is not None or len(question.hidden) != 1:
        raise ValueError(
            f"{task} does not hide a single needle in a given text, as passkey and niah do: rope-patch compare "
            "measures it"
        )
    return question
