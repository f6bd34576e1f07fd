"""Retrieval: whether a model finds what is hidden in a text, at every length and depth."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from rope_patch.evaluation.count_tokens import check_tasks
from rope_patch.evaluation.finished_work import Resume, finished_work
from rope_patch.evaluation.intervals import CONFIDENCE, effective_count, wilson
from rope_patch.evaluation.read_across_processes import read_batches
from rope_patch.evaluation.retrieval.chat_template import chat_frame
from rope_patch.evaluation.retrieval.generate_answers import Answer, answer_prompts
from rope_patch.evaluation.retrieval.haystack import Haystack
from rope_patch.evaluation.retrieval.prompts import Prompt, PromptMaker
from rope_patch.evaluation.tasks import TASKS, Task
from rope_patch.modeling.inputs import check_ids
from rope_patch.modeling.reader import CacheFactory, Reader, cache_identity
from rope_patch.modeling.temporary_modes import in_eval_mode
from rope_patch.options.evaluation import EvalSpec
from rope_patch.runtime.result_cache import key
from rope_patch.texts.documents import check_tokenizer, text_digest


@dataclass(frozen=True)
class Sample:
    """One string that was asked for, and how the model answered.

    Attributes:
        expected: string that was asked for.
        output: text of greedy decoding; of a joined question the whole answer.
        correct: whether the output begins with ``expected``. For a joined question, or a task that counts it anywhere,
            whether the output contains it.
        logprob: log-probability of the tokens of ``expected`` [nats].
    """

    expected: str
    output: str
    correct: bool
    logprob: float


@dataclass(frozen=True)
class RetrievalCell:
    """Scores at one length and depth.

    Attributes:
        length: length of the prompt with all tokens that may be generated [tokens].
        depth: depth of the needle: 0 is the start, and 1 is just before the question. If a task's needles have no
            depths, it is the place of the part in the answer, from 0 for the first to 1 for the last.
        samples: answers, one from each haystack.
    """

    length: int
    depth: float
    samples: tuple[Sample, ...]

    @property
    def correct(self) -> int:
        """Number of exact matches of greedy decoding."""
        return sum(sample.correct for sample in self.samples)


@dataclass(frozen=True)
class RetrievalResult:
    """Scores over lengths × depths.

    Attributes:
        task: name of the task.
        cells: scores at each length and depth.
        seed: seed of the values and haystacks.
        haystack: name of the haystack.
        haystack_sha256: digest of the haystack's text.
        prefix: ids of the special tokens in front of each prompt; none in a chat, whose template writes them.
        chat: whether the prompts go through the tokenizer's chat template.
        chat_sha256: digest of what the template writes before and after a prompt; "" without a template.
    """

    task: str
    cells: tuple[RetrievalCell, ...]
    seed: int
    haystack: str
    haystack_sha256: str
    prefix: tuple[int, ...]
    chat: bool = False
    chat_sha256: str = ""

    def samples(self, length: int) -> list[Sample]:
        """Return all samples of a length, ordered by depth and then by haystack.

        Raises:
            ValueError: nothing was asked at this length.
        """
        samples = [sample for cell in self.cells if cell.length == length for sample in cell.samples]
        if not samples:
            raise ValueError(f"no cell of length {length}. Known: {sorted({c.length for c in self.cells})}")
        return samples

    def accuracy(self, length: int) -> float:
        """Return the share of exact matches at a length, over all depths."""
        return fmean(sample.correct for sample in self.samples(length))

    def answered(self, length: int) -> str:
        """Return how many prompts of a length are answered, as a text: ``2 of 6``."""
        samples = self.samples(length)
        return f"{sum(sample.correct for sample in samples)} of {len(samples)}"

    def haystacks(self, length: int) -> list[tuple[Sample, ...]]:
        """Return the samples of each haystack at a length, ordered by depth."""
        self.samples(length)  # raises an error that names the lengths, if this is none of them
        return list(zip(*(cell.samples for cell in self.cells if cell.length == length), strict=True))

    def interval(self, length: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """Return Wilson's interval of :meth:`accuracy`, over as many prompts as :func:`effective_prompts` counts."""
        haystacks = self.haystacks(length)
        right = [[float(sample.correct) for sample in haystack] for haystack in haystacks]
        count = effective_prompts(self.task, right, confidence)
        return wilson(sum(map(sum, right)), len(self.samples(length)), confidence, count=count)

    def logprob(self, length: int) -> float:
        """Return the mean log-probability of the right answers at a length [nats]."""
        return fmean(sample.logprob for sample in self.samples(length))


def effective_prompts(task: str, haystacks: Sequence[Sequence[float]], confidence: float) -> float:
    """Return how many independent prompts these are worth: prompts of one haystack tend to be answered alike.

    Args:
        task: name of the task; if one question asks for all needles of a haystack, they are worth one prompt.
        haystacks: value of each prompt, grouped by haystack.
        confidence: confidence of the interval that the count is for.
    """
    if TASKS[task].joined:
        return float(len(haystacks))
    return effective_count(haystacks, confidence)


_Haystack = Sequence[Prompt]
"""Prompts of one length that share a haystack."""

RETRIEVAL_FIELDS = ("lengths", "depths", "samples", "seed", "chat_template", "chunk", "batch_tokens")
"""Fields of an :class:`~rope_patch.EvalSpec` that :func:`retrieval` takes as keyword arguments."""


# Long: the public function, whose options are documented one by one.
def retrieval(
    model: nn.Module,
    tokenizer: Any,
    task: str = "passkey",
    *,
    spec: EvalSpec | None = None,
    cache: CacheFactory | None = None,
    haystack: str | Path | Haystack | PromptMaker | None = None,
    resume: Resume = None,
    **asked: Any,
) -> RetrievalResult:
    """Ask for what is hidden in a text, at every length and depth.

    All prompts of one length and sample share a haystack, and the text that they share, which is the text before the
    needle, is read once. The answers are the same as if each prompt were asked alone.

    Args:
        model: a causal language model of transformers.
        tokenizer: the tokenizer of the model.
        task: name of the task in :data:`rope_patch.evaluation.tasks.TASKS`. Some, such as ``"niah_multivalue"`` and
            ``"vt"`` (variable tracking), ask for all at once; a cell then counts one part of the answer.
        spec: the spec of what is measured: the fields :data:`RETRIEVAL_FIELDS` of a :class:`~rope_patch.EvalSpec`, and
            its ``haystack``; its tasks are ignored.
        cache: a factory without arguments, which returns the cache to read through.
        haystack: haystack to use instead of the spec's: ``"noise"``, ``"builtin"``, a file or folder (``Path``), a
            :class:`Haystack`, or a :class:`PromptMaker` of this tokenizer, which then decides about the chat template
            and the special tokens.
        resume: file (or mapping) in which finished haystacks are stored. With a ``cache`` this requires that the
            factory has an ``identity``, a text that tells it from others.
        **asked: fields of a spec by name; they replace those of ``spec``.

    Raises:
        ValueError: the task is unknown, lengths or depths are out of range, or a prompt does not fit; prompts are never
            cut.
        TypeError: a keyword argument is not among :data:`RETRIEVAL_FIELDS`.

    Example:
        ``retrieval(model, tokenizer, "niah", lengths=[4096, 16384], depths=[0, 0.5, 1], samples=4)``
    """
    unknown = asked.keys() - RETRIEVAL_FIELDS
    if unknown:
        raise TypeError(f"retrieval has no {', '.join(sorted(unknown))}. Known: {', '.join(RETRIEVAL_FIELDS)}")
    asked["tasks"] = (task,)
    spec = check_tasks(EvalSpec(**asked) if spec is None else replace(spec, **asked))
    check_tokenizer(tokenizer)
    reader = Reader(model)
    hidden_in = haystack or spec.haystack
    if hidden_in is None:
        raise ValueError("a haystack is needed: noise, builtin, a file or a folder")
    if isinstance(hidden_in, PromptMaker):
        maker = hidden_in
    else:
        maker = PromptMaker(tokenizer, hidden_in, frame=chat_frame(tokenizer, spec.chat_template))
    # Another cache or chunk may change the answer, so they are part of every key. Stop tokens, tokenizer and task are
    # not: answers are stored as token ids, and decoded and graded when they are read.
    settings = cache_identity(cache, resume is not None) | {"chunk": spec.chunk}

    def prompts_of(length: int, sample: int) -> list[Prompt]:
        return maker.prompts(task, length, spec.depths, seed=spec.seed, sample=sample)

    # Raises before any is read, if one does not fit or there are too few questions.
    some = itertools.starmap(prompts_of, itertools.product(spec.lengths, {0, spec.samples - 1}))
    for prompt in itertools.chain.from_iterable(some):
        check_ids(torch.tensor(prompt.ids), reader.vocabulary)

    def name(prompts: _Haystack, model: str) -> str:
        asked_of = [(prompt.ids, prompt.answer, prompt.beyond) for prompt in prompts]
        return key(what="retrieval", prompts=asked_of, model=model, **settings)

    answered = read_batches(
        model,
        ([prompts_of(length, i) for i in group] for length, group in _batches(spec)),
        score=functools.partial(_answered, reader, chunk=spec.chunk, cache=cache),
        name=name,
        tokens=lambda prompts: sum(prompt.length for prompt in prompts),
        work=finished_work(model, resume, spec.longest, cache),
    )
    stops = stop_ids(model, tokenizer)
    samples = defaultdict[tuple[int, float], list[Sample]](list)
    with in_eval_mode(model):
        for prompts, answers in answered:
            for prompt, answer in zip(prompts, answers, strict=True):
                graded = grade(tokenizer, TASKS[task], prompt, Answer(**answer), stops)
                for depth, sample in zip(prompt.depths, graded, strict=True):
                    samples[prompt.length, depth].append(sample)
    return RetrievalResult(
        task=task,
        cells=tuple(RetrievalCell(*place, tuple(of_place)) for place, of_place in samples.items()),
        seed=spec.seed,
        haystack=maker.haystack_of(task).name,
        haystack_sha256=maker.haystack_of(task).sha256,
        prefix=maker.prefix,
        chat=maker.frame is not None,
        chat_sha256="" if maker.frame is None else text_digest(json.dumps(maker.frame)),
    )


def _batches(spec: EvalSpec) -> Iterator[tuple[int, range]]:
    """Yield each length with the numbers of samples that are asked side by side."""
    for length in spec.lengths:
        size = max(1, spec.batch_tokens // length)
        for low in range(0, spec.samples, size):
            yield length, range(low, min(low + size, spec.samples))


def _answered(reader: Reader, haystacks: Sequence[_Haystack], **how: Any) -> list[list[dict[str, Any]]]:
    """Ask the prompts of haystacks, and return the answers of each, ordered by depth, as JSON values."""
    # A batch is generated for the same number of steps: if answers differ in length, each haystack is asked alone.
    groups = [haystacks]
    if len({tuple(prompt.answer for prompt in prompts) for prompts in haystacks}) > 1:
        groups = [[prompts] for prompts in haystacks]
    answered = []
    for group in groups:
        rows = answer_prompts(reader, list(zip(*group, strict=True)), **how)
        answered += [[asdict(answer) for answer in answers] for answers in zip(*rows, strict=True)]
    return answered


def stop_ids(model: nn.Module, tokenizer: Any) -> list[int]:
    """Return the ids of the tokens that end a text, according to the model's generation config and the tokenizer."""
    ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if not isinstance(ids, list | tuple):
        ids = [ids]
    # Chat models often end a turn with another token than the tokenizer's end of text: either of them ends an answer.
    return sorted({int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None})


def grade(tokenizer: Any, task: Task, prompt: Prompt, answer: Answer, stops: Sequence[int]) -> list[Sample]:
    """Return a sample for each part of an answer, which ends before the first of the tokens ``stops``."""
    output = [*itertools.takewhile(lambda token: token not in stops, answer.output)]
    written = tokenizer.decode(output, skip_special_tokens=True)
    samples = []
    start = 0
    for part, end in zip(prompt.parts, prompt.ends, strict=True):
        correct = task.correct(part, written)
        samples.append(Sample(part, written, correct, math.fsum(answer.logprobs[start:end])))
        start = end
    return samples
