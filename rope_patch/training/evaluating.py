"""Evaluations of a run: measured with a progress bar, kept on disk, and compared with the one before training."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

from tqdm import tqdm

from rope_patch.evaluation.key_tokens import KeyTokens
from rope_patch.evaluation.losses import Bucket, DocumentScore, PerplexityResult
from rope_patch.evaluation.metrics import METRICS, PairedDifference
from rope_patch.evaluation.result_cache import ResultCache, finite
from rope_patch.evaluation.retrieval import RetrievalCell, RetrievalResult, Sample
from rope_patch.evaluation.spec import EvalSpec
from rope_patch.evaluation.suite import EvalResult
from rope_patch.processes import from_first, processes
from rope_patch.training.scores import RecipeEvaluator, RecipeScores

Verdict = Literal["better", "worse", "no significant difference"]


class RecordedEvaluations:
    """Evaluates a model, and keeps every result on disk, so that a resumed run has the first one.

    Args:
        evaluator: measures a model.
        path: of the file of results.
    """

    def __init__(self, evaluator: RecipeEvaluator, path: Path) -> None:
        self.evaluator, self.file = evaluator, ResultCache(path)
        self.by_step: dict[int, RecipeScores] = {}

    def __call__(self, model: Any, step: int) -> dict[str, float]:
        """Evaluate a model, and return the numbers that the Trainer logs."""
        result = self.by_step[step] = self._measure(model)

        def record() -> dict[str, float]:
            self.file[str(step)] = {"metrics": result.metrics(), "evaluation": to_json(result)}
            return result.metrics()

        return from_first(record)  # all processes choose the best checkpoint by the same numbers

    def _measure(self, model: Any) -> RecipeScores:
        with tqdm(
            desc="evaluating",
            total=self.evaluator.suite.tokens,
            unit="tok",
            unit_scale=True,
            leave=False,
            disable=processes()[0] > 0,
        ) as bar:
            return self.evaluator(model, bar.update)

    @property
    def before(self) -> dict[str, Any]:
        """The result before training; empty where the model was not evaluated then."""
        result: dict[str, Any] = self.file.get("0", {})
        return result

    def changes(self, final: RecipeScores) -> list[Change]:
        """Return how the metrics changed from before training to the end; empty where nothing was evaluated before."""
        before = self.scores_before(final)
        return [] if before is None else changes(before, final.scores)

    def scores_before(self, final: RecipeScores) -> EvalResult | None:
        """Return the evaluation before training; None where the model was not evaluated then.

        Args:
            final: another evaluation of the run, whose spec is the same.
        """
        return from_json(self.before["evaluation"], final.scores.spec) if self.before else None

    def curve(self, last: int) -> list[dict[str, float]]:
        """Return the metrics of every evaluation up to a step, in order."""
        steps = sorted(step for step in map(int, self.file) if step <= last)
        return [{"step": step, **self.file[str(step)]["metrics"]} for step in steps]

    def final(self, model: Any, state: Any) -> RecipeScores:
        """Return the result of the model that is saved: the best checkpoint has been evaluated already."""
        step = best_step(state)
        step = state.global_step if step is None else step
        return self.by_step[step] if step in self.by_step else self._measure(model)


def best_step(state: Any) -> int | None:
    """Return the step of the checkpoint that Trainer loads at the end; None where it loads none."""
    best = state.best_model_checkpoint
    return None if best is None else int(Path(best).name.rpartition("-")[2])


def to_json(result: RecipeScores) -> dict[str, Any]:
    """Return an evaluation as JSON: every prompt, every position bucket of every window."""
    return {
        "retrieval": asdict(result.retrieval),
        "perplexity": None if result.perplexity is None else asdict(result.perplexity),
        "key_tokens": None if result.scores.key_tokens is None else asdict(result.scores.key_tokens),
    }


@dataclass(frozen=True)
class Change:
    """How one value of a metric changed over a run, paired by prompt or by window of text.

    Attributes:
        metric: its name, a key of :data:`~rope_patch.evaluation.metrics.METRICS`.
        label: the value, such as ``"passkey 1024"``.
        difference: after training minus before it, with its 95 % interval.
    """

    metric: str
    label: str
    difference: PairedDifference

    @property
    def verdict(self) -> Verdict:
        """Better or worse where the 95 % interval excludes 0."""
        if not self.difference.significant:
            return "no significant difference"
        return "better" if (self.difference.low < 0) == METRICS[self.metric].lower_is_better else "worse"

    def __str__(self) -> str:
        """One sentence.

        >>> print(Change("retrieval", "passkey 1024", PairedDifference(-0.4, -0.55, -0.24)))
        passkey 1024 is significantly worse than before training: retrieval -0.40 (-0.55 to -0.24)
        >>> print(Change("retrieval", "passkey 1024", PairedDifference(-0.05, -0.19, 0.07)))
        passkey 1024: no significant difference from before training: retrieval -0.05 (-0.19 to +0.07)
        """
        change = f"{self.metric} {METRICS[self.metric].describe(self.difference)}"
        if self.verdict == "no significant difference":
            return f"{self.label}: no significant difference from before training: {change}"
        return f"{self.label} is significantly {self.verdict} than before training: {change}"

    def to_dict(self) -> dict[str, Any]:
        """Return the change for JSON, with its sentence; None for a number that is not finite."""
        values: dict[str, Any] = finite(
            {
                "metric": self.metric,
                "label": self.label,
                **self.difference._asdict(),
                "verdict": self.verdict,
                "sentence": str(self),
            }
        )
        return values


def changes(before: EvalResult, after: EvalResult) -> list[Change]:
    """Compare two evaluations of one spec: every metric, at every length."""
    return [
        Change(name, metric.heading(span), metric.difference(after, before, span))
        for name, metric in METRICS.items()
        for span in metric.spans(after.spec)
    ]


def from_json(values: dict[str, Any], spec: EvalSpec) -> EvalResult:
    """Return the scores that :func:`to_json` wrote, of one retrieval task."""
    prompts, text = values["retrieval"], values["perplexity"]
    cells = tuple(
        RetrievalCell(cell["length"], cell["depth"], tuple(Sample(**sample) for sample in cell["samples"]))
        for cell in prompts["cells"]
    )
    retrieval = RetrievalResult(**{**prompts, "cells": cells, "prefix": tuple(prompts["prefix"])})
    perplexity = None
    if text is not None:
        buckets = tuple(Bucket(**bucket) for bucket in text["buckets"])
        documents = tuple(
            DocumentScore(**cast("dict[str, Any]", {k: tuple(v) if isinstance(v, list) else v for k, v in one.items()}))
            for one in text["documents"]
        )
        parts = {"buckets": buckets, "documents": documents, "prefix": tuple(text["prefix"])}
        perplexity = PerplexityResult(**{**text, **parts})
    keys = values.get("key_tokens")
    return EvalResult(
        spec, perplexity, {retrieval.task: retrieval}, key_tokens=None if keys is None else KeyTokens(**keys)
    )
