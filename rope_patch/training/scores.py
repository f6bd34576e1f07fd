"""How good a model is while it trains: one evaluation, as numbers that a Trainer logs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rope_patch.evaluation.losses import PerplexityResult
from rope_patch.evaluation.metrics import METRICS
from rope_patch.evaluation.retrieval import RetrievalResult
from rope_patch.evaluation.spec import EvalSpec
from rope_patch.evaluation.suite import EvalResult, EvalSuite
from rope_patch.training.options import EvaluationOptions

SEED = 1_000_003
"""Added to the seed, so that an evaluation asks what no comparison or study with a small seed asks."""


@dataclass(frozen=True)
class RecipeScores:
    """What was measured at one time.

    Attributes:
        scores: perplexity and retrieval.
    """

    scores: EvalResult

    @property
    def retrieval(self) -> RetrievalResult:
        """Exact match and more, by length and depth."""
        (result,) = self.scores.retrieval.values()
        return result

    @property
    def perplexity(self) -> PerplexityResult | None:
        """By position; None where no window was asked for."""
        return self.scores.perplexity

    @property
    def lengths(self) -> Sequence[int]:
        """Prompt lengths [tokens]."""
        return self.scores.spec.lengths

    @property
    def score(self) -> float:
        """What checkpoints are ranked by: mean exact match over the lengths; perplexity only parts equals."""
        answered = [self.retrieval.accuracy(length) for length in self.lengths]
        asked = len(self.lengths) * len(self.retrieval.samples(self.lengths[-1]))
        nll = min(self.perplexity.nll, 99.0) if self.perplexity else 0.0  # one prompt more weighs 1 / asked
        return math.fsum(answered) / len(answered) - nll / (100 * asked)

    def metrics(self) -> dict[str, float]:
        """Return the numbers by name, such as ``retrieval_1024`` and ``perplexity_256_1024``."""
        numbers = {"score": self.score}
        for metric in reversed(METRICS.values()):
            for span in metric.spans(self.scores.spec):
                place = str(span.stop) if span.start is None else f"{span.start}_{span.stop}"
                value = metric.value(self.scores, span)
                if not math.isnan(value):  # positions without a key token have no LongPPL
                    numbers[f"{metric.name}_{place}"] = value
        return numbers


class RecipeEvaluator:
    """Measures a model, always with the same texts and prompts.

    Args:
        options: what is measured.
        lengths: of the prompts [tokens].
        tokenizer: of the model.

    Raises:
        ValueError: what cannot be asked, or too little text: before any training.
    """

    def __init__(self, options: EvaluationOptions, lengths: tuple[int, ...], tokenizer: Any) -> None:
        spec = EvalSpec(
            lengths,
            depths=options.depths,
            samples=options.samples,
            windows=options.windows,
            tasks=(options.task,),
            mode=options.mode,
            text=options.text,
            haystack=options.haystack,
            chat_template=options.chat_template,
            longppl=options.longppl,
            bucket=max(lengths),
            chunk=options.chunk,
            seed=SEED + options.seed,
        )
        try:
            self.suite = EvalSuite(spec, tokenizer)
        except ValueError as error:
            raise ValueError(f"evaluation: {error}") from error

    def __call__(self, model: Any, on_progress: Callable[[int], Any] = lambda tokens: None) -> RecipeScores:
        """Return the scores of a model; it is left in the mode it was in. ``on_progress`` gets the tokens just read."""
        return RecipeScores(self.suite.run(model, on_progress=on_progress))
