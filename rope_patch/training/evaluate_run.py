"""Evaluates a run: its texts and prompts, the numbers that the Trainer logs, and the scores before and after."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rope_patch.evaluation.metrics import METRICS, change_sentence, column_heading
from rope_patch.evaluation.suite import EvalResult, EvalSuite
from rope_patch.options.finetune import RecipeOptions
from rope_patch.runtime import progress
from rope_patch.runtime.parallel import processes
from rope_patch.runtime.result_cache import finite
from rope_patch.texts.documents import encode
from rope_patch.training.documents import text_column

SEED_OFFSET = 1_000_003
"""Number that is added to the seed, so that a run is not evaluated on prompts that `compare` uses with a small seed."""


def suite_of(options: RecipeOptions, tokenizer: PreTrainedTokenizerBase, held_out: Any = None) -> EvalSuite:
    """Return the texts and prompts of a run's evaluations.

    Args:
        options: the options of the run.
        tokenizer: the tokenizer of the model.
        held_out: the documents that were held out of the training data, as a ``datasets`` dataset; None if there are
            none. Perplexity is measured on their texts, unless the options name another text.

    Raises:
        ValueError: the task cannot be asked at these lengths, or there is too little text.
    """
    spec = options.evaluation.spec
    lengths = options.evaluation_lengths
    texts: list[str] = []
    if held_out is not None and spec.text is None and text_column(options) in held_out.column_names:
        texts = list(held_out[text_column(options)])
    # The text is scored between the lengths alone, so it needs no finer position buckets.
    spec = replace(
        spec, lengths=lengths, tasks=(options.evaluation.task,), bucket=max(lengths), seed=SEED_OFFSET + spec.seed
    )
    if texts and spec.windows:
        # A tenth of the data may hold fewer windows than asked for, and holds one at least.
        (stream,) = encode(tokenizer, "\n\n".join(texts), prefix=())
        spec = replace(spec, windows=max(1, min(spec.windows, len(stream.ids) // spec.longest)))
    try:
        suite = EvalSuite(spec, tokenizer, text=texts or None)
    except ValueError as error:
        raise ValueError(f"evaluation: {error}") from error
    if texts:
        suite.text_name = f"{len(texts)} documents of {options.data.source} that are kept from training"
    return suite


def evaluate_model(suite: EvalSuite, model: PreTrainedModel) -> EvalResult:
    """Return the scores of a model, behind a progress bar."""
    with progress.bar(suite.tokens, "evaluating", hidden=processes()[0] > 0):
        return suite.run(model)


def score(result: EvalResult) -> float:
    """Return the score that ranks checkpoints: mean exact match over the lengths, then the lower perplexity."""
    (retrieval,) = result.retrieval.values()
    lengths = result.spec.lengths
    prompts = len(lengths) * len(retrieval.samples(lengths[-1]))
    # Divided by 100 * prompts, the loss of text is always less than one prompt more, which is 1 / prompts.
    nll = 0.0
    if result.perplexity:
        nll = min(result.perplexity.nll, 99.0)
    return fmean(retrieval.accuracy(length) for length in lengths) - nll / (100 * prompts)


def metrics(result: EvalResult) -> dict[str, float]:
    """Return the values of all metrics by name, such as ``retrieval_1024`` and ``perplexity_256_1024``."""
    numbers = {"score": score(result)}
    # Retrieval stands first: the model card lists the numbers in this order.
    for metric in sorted(METRICS.values(), key=lambda one: one.name != "retrieval"):
        for span in metric.spans(result.spec):
            numbers[f"{metric.name}_{span}".replace("-", "_")] = metric.value(result, span)
    return numbers


def changes(before: EvalResult, after: EvalResult) -> list[dict[str, Any]]:
    """Compare two evaluations of one spec in every metric at every length, paired by prompt or by window of text.

    Returns:
        A dict for each metric and length: metric, label (such as ``"passkey 1024"``), the difference with its 95 %
        interval (None for a number that is not finite), the verdict (``better`` or ``worse`` if the interval excludes
        0), and a sentence.
    """
    compared = []
    for name, metric in METRICS.items():
        for span in metric.spans(after.spec):
            label = column_heading(metric, span)
            difference = metric.difference(after, before, span)
            change = f"{metric.name} {change_sentence(metric, difference)}"
            verdict = "no significant difference"
            sentence = f"{label}: no significant difference from before training: {change}"
            if difference.significant:
                verdict = "better" if (difference.low < 0) == metric.lower_is_better else "worse"
                sentence = f"{label} is significantly {verdict} than before training: {change}"
            values = {"metric": name, "label": label, **difference._asdict(), "verdict": verdict, "sentence": sentence}
            compared.append(finite(values))
    return compared
