"""How good a model is while it trains: one perplexity by position and one retrieval grid, as numbers a Trainer logs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_patch.evaluation.documents import spread_windows
from rope_patch.evaluation.perplexity import PerplexityResult, perplexity
from rope_patch.evaluation.prompts import PromptMaker
from rope_patch.evaluation.retrieval import RetrievalResult, check_asked, retrieval
from rope_patch.evaluation.text import builtin_text
from rope_patch.training.options import EvaluationOptions

SEED = 1_000_003
"""Added to the seed, so that an evaluation asks what no comparison or study with a small seed asks."""


@dataclass(frozen=True)
class Judgement:
    """What was measured at one time.

    Attributes:
        retrieval: exact match and more, by length and depth.
        perplexity: by position; None where no window was asked for.
    """

    retrieval: RetrievalResult
    perplexity: PerplexityResult | None

    @property
    def lengths(self) -> list[int]:
        """Prompt lengths [tokens]."""
        return sorted({cell.length for cell in self.retrieval.cells})

    @property
    def score(self) -> float:
        """What checkpoints are ranked by: mean exact match over the lengths; perplexity only parts equals."""
        found = [self.retrieval.accuracy(length) for length in self.lengths]
        asked = len(self.lengths) * len(self.retrieval.samples(self.lengths[-1]))
        nll = min(self.perplexity.nll, 99.0) if self.perplexity else 0.0  # one prompt more weighs 1 / asked
        return math.fsum(found) / len(found) - nll / (100 * asked)

    def metrics(self) -> dict[str, float]:
        """Return the numbers by name, such as ``retrieval_1024`` and ``perplexity_256_1024``."""
        made = {"score": self.score}
        made |= {f"retrieval_{length}": self.retrieval.accuracy(length) for length in self.lengths}
        if self.perplexity:
            edges = [0, *self.lengths]
            made |= {
                f"perplexity_{start}_{stop}": self.perplexity.between(start, stop)
                for start, stop in itertools.pairwise(edges)
            }
        return made


class Judge:
    """Measures a model, always with the same texts and prompts.

    Args:
        options: what is measured.
        lengths: of the prompts [tokens].
        tokenizer: of the model.

    Raises:
        ValueError: what cannot be asked, or too little text: before any training.
    """

    def __init__(self, options: EvaluationOptions, lengths: tuple[int, ...], tokenizer: Any) -> None:
        self.options, self.tokenizer = options, tokenizer
        self.lengths, self.depths = check_asked(
            options.task, options.mode, lengths, options.depths, options.samples, options.chunk
        )
        hay = options.haystack if options.haystack in ("builtin", "noise") else Path(options.haystack)
        self.maker = PromptMaker(tokenizer, hay)
        for length in self.lengths:
            self.maker.prompts(options.task, length, self.depths, mode=options.mode, seed=SEED + options.seed)
        self.windows: list[Any] = []
        if options.windows:
            source = builtin_text("heldout") if options.text is None else Path(options.text)
            try:
                self.windows, _ = spread_windows(tokenizer, source, max(self.lengths), options.windows)
            except ValueError as error:
                raise ValueError(f"evaluation.text: {error}") from error

    def __call__(self, model: Any, on_progress: Callable[[int], Any] = lambda tokens: None) -> Judgement:
        """Return the scores of a model; it is left in the mode it was in. ``on_progress`` gets the tokens just read."""
        longest, chunk = max(self.lengths), self.options.chunk
        score = None
        if self.windows:
            score = perplexity(
                model,
                self.windows,
                window=longest,
                buckets=(0, *self.lengths),
                chunk=None if chunk is None else min(chunk, longest),
                batch=1 if chunk else max(1, 4096 // longest),
                progress=on_progress,
            )
        found = retrieval(
            model,
            self.tokenizer,
            self.options.task,
            lengths=self.lengths,
            depths=self.depths,
            samples=self.options.samples,
            seed=SEED + self.options.seed,
            mode=self.options.mode,
            haystack=self.maker,
            chunk=chunk,
            progress=on_progress,
        )
        return Judgement(found, score)
