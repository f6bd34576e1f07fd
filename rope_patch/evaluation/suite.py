"""An evaluation whose windows and prompts are made once and then read by any number of models."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from operator import methodcaller
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from torch import nn

from rope_patch.evaluation.count_tokens import check_tasks, tokens_to_read
from rope_patch.evaluation.finished_work import Resume, finished_work
from rope_patch.evaluation.perplexity.key_tokens import context_windows, mark_key_tokens, tokens_to_mark
from rope_patch.evaluation.perplexity.measure import perplexity
from rope_patch.evaluation.perplexity.result import PerplexityResult
from rope_patch.evaluation.retrieval.chat_template import chat_frame
from rope_patch.evaluation.retrieval.haystack import Haystack
from rope_patch.evaluation.retrieval.measure import RetrievalResult, retrieval
from rope_patch.evaluation.retrieval.prompts import PromptMaker
from rope_patch.evaluation.tasks import TASKS
from rope_patch.modeling.reader import CacheFactory, KnownStates
from rope_patch.options.evaluation import EvalSpec
from rope_patch.patching.verify import trained_length
from rope_patch.runtime import progress
from rope_patch.runtime.result_cache import finite
from rope_patch.texts.builtin_text import Corpus, builtin_text
from rope_patch.texts.documents import Source, TokenDocument, check_tokenizer, spread_windows, whole_text

ANSWERED_SHARE = 0.75
"""Share of the prompts within its trained length that an unpatched model must answer; otherwise the task is too hard
for it, and scores at longer prompts say little."""


@dataclass(frozen=True)
class EvalResult:
    """The scores of one model.

    Attributes:
        spec: the spec of what was measured.
        perplexity: perplexity by position; None if no window of text was asked for.
        retrieval: retrieval by length and depth, for each task.
    """

    spec: EvalSpec
    perplexity: PerplexityResult | None
    retrieval: Mapping[str, RetrievalResult]

    def to_dict(self) -> dict[str, Any]:
        """Return the scores as JSON values, without the spec."""
        return {
            "perplexity": None if self.perplexity is None else finite(asdict(self.perplexity)),
            "retrieval": {task: asdict(result) for task, result in self.retrieval.items()},
        }


AnySuite = TypeVar("AnySuite", bound="Suite")


def retrieval_warnings(scores: Mapping[str, EvalResult], unpatched: str, trained_length: int) -> list[str]:
    """Return a sentence for each task that the unpatched model mostly fails within its trained length.

    If it was not measured, the best of the others stands for it: where one answers, the task is not too hard.

    Args:
        scores: results of all methods, all of one spec.
        unpatched: name of the unpatched model among them.
        trained_length: trained context length of the model [tokens].
    """
    subject = "without a patch the model"
    unmeasured = ""
    if unpatched in scores:
        results = [scores[unpatched]]
    else:
        subject = "the best method"
        unmeasured = ", and the unpatched model was not measured (rope-patch compare takes --methods default)"
        results = list(scores.values())
    within = [length for length in results[0].spec.lengths if length <= trained_length]
    if not within:
        return []
    warnings = []
    for task in results[0].retrieval:
        of_task = [one.retrieval[task] for one in results]
        best = [(length, max(of_task, key=methodcaller("accuracy", length))) for length in within]
        length, result = min(best, key=lambda pair: pair[1].accuracy(pair[0]))
        if result.accuracy(length) < ANSWERED_SHARE:
            asked = f"parts of {task}" if TASKS[task].joined else task
            warnings.append(
                f"{subject} answers {result.answered(length)} {asked} prompts of {length} tokens, within the trained "
                f"length of {trained_length}{unmeasured}, so longer prompts may be too hard for the model with any "
                "table. Ask easier ones: rope-patch compare with --tasks passkey, another --haystack or another "
                "--chat-template"
            )
    return warnings


class Suite(ABC):
    """What is measured of any number of models, made once, in one tokenizer's tokens.

    Args:
        spec: the spec of what is measured.
        tokenizer: the tokenizer of the models that will be measured.
        text: a text in memory that replaces the spec's, as
            :func:`~rope_patch.texts.documents.documents` takes it.

    Attributes:
        spec: the spec as given.
        tokenizer: the tokenizer as given.
        source: the text that is read.
        windows: windows of the text, each as long as the longest length and beginning with the special tokens.
        text_name: name of the text in results.
        text_sha256: digest of the text; "" if none is read.

    Raises:
        ValueError: there is too little text.
        FileNotFoundError: a file of the spec does not exist.
    """

    most_windows: ClassVar[int] = 8
    """Number of windows if the spec states none; fewer are read of a short text."""

    def __init__(self, spec: EvalSpec, tokenizer: Any, text: Source | None = None) -> None:
        self.spec = check_tasks(spec)
        self.tokenizer = tokenizer
        if text is None:
            text = builtin_text("heldout") if spec.text is None else Path(spec.text)
        self.source = text
        self.text_name = _name(self.source)
        self.windows: list[TokenDocument] = []
        self.text_sha256 = ""
        if spec.windows != 0:
            self.windows, self.text_sha256 = spread_windows(
                tokenizer, self.source, spec.longest, spec.windows, most=self.most_windows
            )

    @property
    def planned(self) -> EvalSpec:
        """The spec with the number of windows that the text has room for."""
        return replace(self.spec, windows=len(self.windows))

    def tokens_to_mark(self, model: nn.Module) -> int:
        """Return how many tokens a model reads to mark the key tokens; 0 if the spec does not ask for them.

        Raises:
            ValueError: the short context is too long.
        """
        if self.spec.short_context is None:
            return 0
        windows = context_windows(self.spec.longest, self.spec.short_context, trained_length(model))
        return len(self.windows) * tokens_to_mark(self.spec.longest, windows)

    def mark_key_tokens(self, model: nn.Module, *, resume: Resume = None) -> None:
        """Mark the key tokens of the windows, if the spec asks for them and no model has marked them yet.

        Args:
            model: the model that decides which tokens need the long context: the unpatched one.
            resume: file (or mapping) in which finished windows are stored.

        Raises:
            ValueError: the short context is too long, or no token needs more.
        """
        if self.spec.short_context is None or self.windows[0].key_tokens is not None:
            return
        with progress.stage("key tokens"):
            self.windows = mark_key_tokens(
                model,
                self.windows,
                short=self.spec.short_context,
                longest=trained_length(model),
                batch_tokens=self.spec.batch_tokens,
                chunk=self.spec.chunk,
                resume=resume,
            )

    @abstractmethod
    def run(self, model: nn.Module, *, resume: Resume = None) -> EvalResult:
        """Return the scores of a model; ``resume`` is a file (or mapping) in which finished work is stored."""


class EvalSuite(Suite):
    """The windows of text and the prompts of a spec, in one tokenizer's tokens.

    Args:
        spec: the spec of what is measured.
        tokenizer: the tokenizer of the models that will be measured.
        text: a text in memory that replaces the spec's, as
            :func:`~rope_patch.texts.documents.documents` takes it.
        haystack: a haystack in memory that replaces the spec's.

    Attributes:
        prompts: the maker of the prompts.

    Raises:
        ValueError: there is too little text, or a prompt does not fit; it is raised before any model reads anything.
        FileNotFoundError: a file of the spec does not exist.

    Example:
        ``scores = EvalSuite(EvalSpec(lengths=[4096, 16384]), tokenizer).run(model)``
    """

    def __init__(
        self, spec: EvalSpec, tokenizer: Any, *, text: Source | None = None, haystack: Haystack | None = None
    ) -> None:
        super().__init__(spec, tokenizer, text)
        self.prompts = PromptMaker(
            tokenizer,
            haystack or spec.haystack or Haystack(whole_text(self.source), self.text_name),
            frame=chat_frame(tokenizer, spec.chat_template),
        )
        # Prompts are made now, so that what does not fit raises before a model is read. The last haystack tells whether
        # there are enough questions.
        for task, length, sample in itertools.product(self.spec.tasks, spec.lengths, {0, spec.samples - 1}):
            self.prompts.prompts(task, length, spec.depths, seed=spec.seed, sample=sample)

    @property
    def tokens(self) -> int:
        """Number of tokens that one run reads, to which a progress bar counts."""
        return tokens_to_read(self.planned)

    def run(
        self,
        model: nn.Module,
        *,
        cache: CacheFactory | None = None,
        window_batch: int | None = None,
        resume: Resume = None,
        known: KnownStates | None = None,
    ) -> EvalResult:
        """Return the scores of a model, which stays in training or eval mode as it was.

        Args:
            model: a causal language model of transformers.
            cache: a factory without arguments, which returns the cache to read through, such as a quantized one.
            window_batch: number of windows of text in a forward pass; by default as many as the spec's ``batch_tokens``
                hold. With 1, a cache that rounds gives the same digits whatever the other windows are.
            resume: file (or mapping) in which finished windows and prompts are stored, each under a key made of its
                content, so that the same call continues where it stopped. With a ``cache`` this requires that the
                factory has an ``identity``.
            known: function that returns the states of a window which was read already, as ``perplexity`` takes it.

        Returns:
            The scores.

        Raises:
            ValueError: logits are not finite, or the model does not know some token ids.
            TypeError: the argument is not a model, for example the name of one.
        """
        spec = self.spec
        self.mark_key_tokens(model, resume=resume)
        work = finished_work(model, resume, spec.longest, cache)
        score = None
        if self.windows:
            score = perplexity(
                model,
                self.windows,
                window=spec.longest,
                buckets=spec.edges,
                chunk=spec.chunk,
                batch=window_batch or spec.window_batch,
                cache=cache,
                resume=work,
                known=known,
            )
        answers = {
            task: retrieval(model, self.tokenizer, task, spec=spec, haystack=self.prompts, cache=cache, resume=work)
            for task in spec.tasks
        }
        return EvalResult(spec, score, answers)


def as_suite(spec: EvalSpec | AnySuite, tokenizer: Any) -> AnySuite | EvalSuite:
    """Return the suite of a spec; a suite is returned as it is.

    Raises:
        TypeError: the argument is neither a spec nor a suite.
        ValueError: the tokenizer is not one.
    """
    if isinstance(spec, Suite):
        if tokenizer is not None:  # the suite has its own
            check_tokenizer(tokenizer)
        return spec
    if not isinstance(spec, EvalSpec):
        raise TypeError(f"spec must be an EvalSpec or an EvalSuite, got {type(spec).__name__}")
    return EvalSuite(spec, tokenizer)


def _name(source: Source) -> str:
    match source:
        case Corpus():
            return f"built-in {source.split} text"
        case Path():
            return source.name
    return "text of the user's own"
