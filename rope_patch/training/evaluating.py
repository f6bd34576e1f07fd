"""Evaluations of a run: one protocol, numbers that the Trainer logs, and the comparison with those before training."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState

from rope_patch.evaluation.key_tokens import KeyTokens
from rope_patch.evaluation.losses import Bucket, DocumentScore, PerplexityResult
from rope_patch.evaluation.metrics import METRICS, Metric, PairedDifference
from rope_patch.evaluation.retrieval import RetrievalCell, RetrievalResult, Sample
from rope_patch.evaluation.suite import EvalResult, EvalSuite
from rope_patch.options.evaluation import EvalSpec
from rope_patch.options.finetune import RecipeOptions
from rope_patch.runtime import progress
from rope_patch.runtime.finished import finite
from rope_patch.runtime.folders import write_atomically
from rope_patch.runtime.parallel import from_first, processes

SEED = 1_000_003
"""Added to the seed, so that an evaluation asks what no comparison or study with a small seed asks."""


def suite_of(options: RecipeOptions, tokenizer: PreTrainedTokenizerBase) -> EvalSuite:
    """Return the texts and prompts of a run's evaluations.

    Raises:
        ValueError: what cannot be asked, or too little text.
    """
    spec, lengths = options.evaluation.spec, options.evaluation_lengths
    spec = replace(spec, lengths=lengths, tasks=(options.evaluation.task,), bucket=max(lengths), seed=SEED + spec.seed)
    try:
        return EvalSuite(spec, tokenizer)
    except ValueError as error:
        raise ValueError(f"evaluation: {error}") from error


def retrieval_of(result: EvalResult) -> RetrievalResult:
    """Return the scores of the one retrieval task."""
    (scores,) = result.retrieval.values()
    return scores


def score(result: EvalResult) -> float:
    """Return what checkpoints are ranked by: mean exact match over the lengths; of equals, the lower perplexity."""
    retrieval, lengths = retrieval_of(result), result.spec.lengths
    asked = len(lengths) * len(retrieval.samples(lengths[-1]))
    nll = min(result.perplexity.nll, 99.0) if result.perplexity else 0.0  # one prompt more weighs 1 / asked
    return math.fsum(retrieval.accuracy(length) for length in lengths) / len(lengths) - nll / (100 * asked)


def metrics(result: EvalResult) -> dict[str, float]:
    """Return the numbers by name, such as ``retrieval_1024`` and ``perplexity_256_1024``."""
    numbers = {"score": score(result)}
    for metric in reversed(list(METRICS.values())):
        for span in metric.spans(result.spec):
            place = str(span.stop) if span.start is None else f"{span.start}_{span.stop}"
            value = metric.value(result, span)
            if not math.isnan(value):  # positions without a key token have no LongPPL
                numbers[f"{metric.name}_{place}"] = value
    return numbers


class Evaluations:
    """Evaluates a model, and keeps the first result on disk, for a resumed run to compare with.

    Args:
        suite: the texts and prompts.
        path: the file of the evaluation before training.
    """

    def __init__(self, suite: EvalSuite, path: Path) -> None:
        self.suite, self.path = suite, path
        self.by_step: dict[int, EvalResult] = {}

    def __call__(self, model: PreTrainedModel, step: int) -> dict[str, float]:
        """Evaluate a model, and return the numbers that the Trainer logs."""
        result = self.by_step[step] = self._measure(model)

        def record() -> dict[str, float]:
            if step == 0:
                write_atomically(self.path, json.dumps(result.to_dict(), allow_nan=False))
            return metrics(result)

        return from_first(record)  # all processes choose the best checkpoint by the same numbers

    def _measure(self, model: PreTrainedModel) -> EvalResult:
        quiet = processes()[0] > 0
        with progress.bar(self.suite.tokens, "evaluating", hidden=quiet):
            return self.suite.run(model)

    def before(self) -> EvalResult | None:
        """Return the evaluation before training; None where the model was not evaluated then."""
        if not self.path.is_file():
            return None
        return from_json(json.loads(self.path.read_text(encoding="utf-8")), self.suite.spec)

    def final(self, model: PreTrainedModel, state: TrainerState) -> EvalResult:
        """Return the result of the model that is saved; that of a best checkpoint has been measured already."""
        step = best_step(state)
        step = state.global_step if step is None else step
        return self.by_step[step] if step in self.by_step else self._measure(model)


def best_step(state: TrainerState) -> int | None:
    """Return the step of the checkpoint that Trainer loads at the end; None where it loads none."""
    best = state.best_model_checkpoint
    return None if best is None else int(Path(best).name.rpartition("-")[2])


def changes(before: EvalResult, after: EvalResult) -> list[dict[str, Any]]:
    """Compare two evaluations of one spec, paired by prompt or by window of text: every metric, at every length.

    Returns:
        For each, metric, label (such as ``"passkey 1024"``), the difference with its 95 % interval (None for a number
        that is not finite), the verdict (``better`` or ``worse`` where the interval excludes 0), and a sentence.
    """
    compared = []
    for name, metric in METRICS.items():
        for span in metric.spans(after.spec):
            label, difference = metric.heading(span), metric.difference(after, before, span)
            verdict, sentence = _verdict(metric, label, difference)
            values = {"metric": name, "label": label, **difference._asdict(), "verdict": verdict, "sentence": sentence}
            compared.append(finite(values))
    return compared


def _verdict(metric: Metric, label: str, difference: PairedDifference) -> tuple[str, str]:
    change = f"{metric.name} {metric.describe(difference)}"
    if not difference.significant:
        return "no significant difference", f"{label}: no significant difference from before training: {change}"
    verdict = "better" if (difference.low < 0) == metric.lower_is_better else "worse"
    return verdict, f"{label} is significantly {verdict} than before training: {change}"


def from_json(values: dict[str, Any], spec: EvalSpec) -> EvalResult:
    """Return the scores of one retrieval task that :meth:`EvalResult.to_dict` gave."""
    (prompts,), text, keys = values["retrieval"].values(), values["perplexity"], values.get("key_tokens")
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
    tokens = None if keys is None else KeyTokens(**keys)
    return EvalResult(spec, perplexity, {retrieval.task: retrieval}, values.get("short_window", 0), tokens)
