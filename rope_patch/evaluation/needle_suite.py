"""Windows of text with a needle in each: one reading measures their perplexity and asks at every length on the way."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rope_patch.evaluation.documents import Source, TokenDocument
from rope_patch.evaluation.generate_answers import answer_from, copy_cache
from rope_patch.evaluation.perplexity import sums_by_position
from rope_patch.evaluation.perplexity_result import DocumentSums, PerplexityResult, Window
from rope_patch.evaluation.prompts import Prompt, PromptMaker
from rope_patch.evaluation.read_across_processes import BatchReader
from rope_patch.evaluation.retrieval import RetrievalCell, RetrievalResult, Sample, grade, stop_ids
from rope_patch.evaluation.suite import EvalResult, Suite
from rope_patch.evaluation.tasks import TASKS, Draw, Question
from rope_patch.modeling.inputs import check_ids, ids_hash
from rope_patch.modeling.scoring import Reader, losses, model_hash
from rope_patch.modeling.temporary_modes import in_eval_mode
from rope_patch.options.evaluation import EvalSpec
from rope_patch.runtime.progress import Progress
from rope_patch.runtime.result_cache import code_identity, key, open_cache

# A part of the keys of the result cache: raise it when what is stored for a window changes.
SCHEMA = 1
SEARCHED_TOKENS = 32
"""Number of tokens among which the beginning of a word is looked for, where a needle may stand."""


@dataclass(frozen=True, eq=False)
class NeedleWindow:
    """A window of text with the needles of all tasks, and what is asked about them.

    Attributes:
        source: the text with the needles, up to the last question.
        is_text: (tokens,) bool, the tokens whose loss counts: those of the text.
        questions: for each task the question with its answer, in tokens of their own.
    """

    source: TokenDocument
    is_text: Tensor
    questions: tuple[Prompt, ...]


class NeedleSuite(Suite):
    """An evaluation that reads each window once, for perplexity and for retrieval.

    A needle of each task lies in each window, within the shortest length. At every length the question follows the
    text that was read so far, in a copy of the cache, so that it moves away from its needle. The loss of the needles
    does not count.

    Args:
        spec: the spec of what is measured, without its ``samples``, which are the windows, and its ``depths``: the
            needles divide the shortest length evenly.
        tokenizer: the tokenizer of the models that will be measured.
        text: a text in memory that replaces the spec's.

    Raises:
        ValueError: there is too little text, a task asks for several needles or brings a text of its own, or the
            shortest length has no room for the tasks.
        FileNotFoundError: the file of the text does not exist.
    """

    def __init__(self, spec: EvalSpec, tokenizer: Any, text: Source | None = None) -> None:
        super().__init__(spec, tokenizer, text)
        count, needles = len(self.windows), len(spec.tasks)
        depths = [(k + 1) / (1 + needles) for k in range(needles)]
        self.spec = replace(self.spec, windows=count, samples=count, depths=depths)
        self.maker = PromptMaker(tokenizer, prefix=())
        self.laden = [self._laden(window) for window in self.windows]
        # The same room for each task and window, so that all are read up to the same positions.
        self.room = max(len(question.ids) for one in self.laden for question in one.questions)
        for shorter, longer in itertools.pairwise(self.spec.lengths):
            if longer - shorter <= self.room:
                raise ValueError(f"{longer} tokens are too few beyond {shorter}: give more than {shorter + self.room}")
        # No text stands where a question does: the range before each length ends with it.
        ends = [range(length - self.room, length) for length in self.spec.lengths]
        self.edges = [edge for edge in self.spec.edges if not any(edge in end for end in ends)]

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
        part.laden = [self.laden[i] for i in sorted(order[:windows])]
        return part

    def _laden(self, window: TokenDocument) -> NeedleWindow:
        """Return a window with its needles and questions, drawn by the seed and the window's name."""
        spec, tokenizer = self.spec, self.tokenizer
        draw = Draw(tokenizer, random.Random(f"{spec.seed}/{window.name}"), spec.longest)
        asked = [_question(task, draw) for task in spec.tasks]
        needles = [self.maker.encode(question.hidden[0][1]) for question in asked]
        prompts = []
        for question in asked:
            text = question.text + question.answer_prefix
            prompts.append(self.maker.divide(text, self.maker.encode(text + question.target), question))
        first = len(window.prefix)
        # Text of the shortest length, which the needles divide evenly.
        room = spec.lengths[0] - max(len(prompt.ids) for prompt in prompts) - sum(map(len, needles)) - first
        if room * spec.depths[0] < SEARCHED_TOKENS:
            raise ValueError(f"{spec.lengths[0]} tokens are too few for {', '.join(spec.tasks)}: give longer lengths")
        tokens = window.ids.tolist()
        ids, is_text, done = list[int](), list[bool](), 0
        for depth, needle in zip(spec.depths, needles, strict=True):
            at = self._word_start(tokens, first + round(depth * room))
            ids += tokens[done:at]
            ids += needle
            # The token behind a needle continues the text before it.
            is_text += [True] * (at - done) + [False] * (len(needle) + 1)
            ids.append(tokens[at])
            done = at + 1
        ids += tokens[done:]
        is_text += [True] * (len(tokens) - done)
        is_text[:first] = [False] * first
        source = TokenDocument(window.name, torch.tensor(ids), None, window.prefix)
        return NeedleWindow(source, torch.tensor(is_text), tuple(prompts))

    def _word_start(self, ids: list[int], place: int) -> int:
        """Return the first place from here on where a word begins; the place itself if none does soon."""
        for at in range(place, place + SEARCHED_TOKENS):
            before = len(self.tokenizer.decode(ids[at - 1 : at]))
            if self.tokenizer.decode(ids[at - 1 : at + 1])[before:][:1].isspace():
                return at
        return place

    def run(self, model: nn.Module, *, resume: str | Path | MutableMapping[str, Any] | None = None) -> EvalResult:
        """Return the scores of a model, which stays in training or eval mode as it was.

        Args:
            model: a causal language model of transformers.
            resume: file (or mapping) in which finished windows are stored, each under a key made of its content.

        Raises:
            ValueError: logits are not finite, or the model does not know some token ids.
            TypeError: the argument is not a model, for example the name of one.
        """
        spec, reader = self.spec, Reader(model)
        chunk = reader.default_chunk(spec.longest) if spec.chunk is None else min(spec.chunk, spec.longest)
        stops = stop_ids(model, self.tokenizer)
        settings: dict[str, Any] = {"lengths": spec.lengths, "room": self.room, "edges": self.edges}
        settings |= {"chunk": chunk, "stops": stops}
        if resume is not None:  # the hash reads every weight: only where keys are stored
            tasks = [code_identity(type(TASKS[task])) for task in spec.tasks]
            settings |= {"model": model_hash(model), "tasks": tasks}

        def name(item: NeedleWindow) -> str:
            questions = [(prompt.ids, prompt.answer, prompt.parts, prompt.ends) for prompt in item.questions]
            text = ids_hash(item.source.ids), ids_hash(item.is_text.long())
            return key(what="needle window", schema=SCHEMA, text=text, questions=questions, **settings)

        def score(items: list[NeedleWindow], size: int) -> list[dict[str, Any]]:
            return [self._read(reader, item, chunk, stops, Progress(size)) for item in items]

        batch_reader = BatchReader(
            score=score, name=name, tokens=lambda item: spec.longest, result_cache=open_cache(resume)
        )
        for one in self.laden:
            check_ids(one.source.ids, reader.vocabulary)
        with in_eval_mode(model):
            values = [value for _, value in batch_reader.read(model, ([one] for one in self.laden))]
        return EvalResult(spec, self._perplexity(values, chunk), self._retrieval(values))

    def _read(
        self, reader: Reader, item: NeedleWindow, chunk: int, stops: list[int], progress: Progress
    ) -> dict[str, Any]:
        """Read a window, and ask at every length."""
        ids, past = item.source.ids, reader.new_cache(self.spec.longest)
        parts, answers, read = [], [], 0
        scored = item.is_text[: self.spec.longest - self.room].clone()
        for length in self.spec.lengths:
            stop = length - self.room
            part, _ = losses(reader, ids[None, read:stop], [1], chunk=chunk, cache=lambda: past, progress=progress)
            parts.append(part[0])
            scored[read] = False  # no state of this part predicts its first token
            read = stop
            for task, question in zip(self.spec.tasks, item.questions, strict=True):
                prompt = torch.cat([ids[:stop], torch.tensor(question.ids)])[None]
                (answer,) = answer_from(reader, [question], prompt, stop, copy_cache(past), stops=stops)
                (sample,) = grade(self.tokenizer, TASKS[task], question, answer)
                answers.append(asdict(sample))
        sums = sums_by_position(_window(item, 0), torch.cat(parts), scored, self.edges)
        return {"text": sums, "answers": answers}

    def _perplexity(self, values: list[dict[str, Any]], chunk: int) -> PerplexityResult:
        tally = DocumentSums(self.edges)
        for number, (one, value) in enumerate(zip(self.laden, values, strict=True)):
            tally.add(_window(one, number), value["text"])
        return tally.result(window=self.spec.longest, stride=self.spec.longest, chunk=chunk)

    def _retrieval(self, values: list[dict[str, Any]]) -> dict[str, RetrievalResult]:
        spec, asked = self.spec, list(itertools.product(range(len(self.spec.lengths)), range(len(self.spec.tasks))))
        cells: dict[str, list[RetrievalCell]] = {task: [] for task in spec.tasks}
        prefix = self.laden[0].source.prefix
        haystack = f"{self.text_name}, a needle in the first {spec.lengths[0]} tokens of each window"
        for at, (i, k) in enumerate(asked):
            samples = tuple(Sample(**value["answers"][at]) for value in values)
            # About there: each needle stands between two words.
            depth = spec.depths[k] * spec.lengths[0] / spec.lengths[i]
            cells[spec.tasks[k]].append(RetrievalCell(spec.lengths[i], depth, samples))
        return {
            task: RetrievalResult(
                task,
                tuple(found),
                spec.seed,
                haystack,
                self.text_sha256,
                self.python_version,
                prefix,
                in_windows=True,
            )
            for task, found in cells.items()
        }


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


def _window(item: NeedleWindow, number: int) -> Window:
    return Window(number, 0, len(item.source.ids), 1, item.source)
