"""How far a model reads, as RULER says it: the length up to which it keeps a score."""

from __future__ import annotations

from rope_patch.evaluation.metrics import METRICS
from rope_patch.evaluation.suite import EvalResult

RULER_THRESHOLD = 0.856
"""Score of Llama 2 7B at 4096 tokens, above which RULER calls a length effective (Hsieh et al. 2024, table 3)."""
OWN_SHARE = 0.9
"""Share of its own score at the shortest length that a model keeps within its effective length, where it is small."""


def effective_length(result: EvalResult, threshold: float = RULER_THRESHOLD) -> int:
    """Return the last length up to which the mean over RULER's tasks is above a threshold [tokens].

    Args:
        result: the scores of one model, of a spec whose tasks are ``["ruler"]``.
        threshold: the mean that a length must exceed, in [0, 1].

    Returns:
        The length; 0 if the mean is at or below the threshold at the shortest length already.

    Raises:
        ValueError: not all of RULER's tasks were asked.
    """
    metric = METRICS["mean"]
    spans = [span for span in metric.spans(result.spec) if span.task == "ruler"]
    if not spans:
        raise ValueError("not all of RULER's tasks were asked: give tasks=['ruler']")
    reached = 0
    for span in spans:
        if metric.value(result, span) <= threshold:
            break
        reached = span.stop
    return reached


def effective_sentence(name: str, result: EvalResult) -> str:
    """Return a sentence with the effective lengths of a model by RULER's threshold and by its own score."""
    metric = METRICS["mean"]
    shortest = next(span for span in metric.spans(result.spec) if span.task == "ruler")
    own = OWN_SHARE * metric.value(result, shortest)
    if own == 0:
        return f"{name}: no part of RULER-11 is right at {shortest.stop} tokens already: a floor is no evidence."
    by_ruler, by_own = (effective_length(result, threshold) or "none" for threshold in (RULER_THRESHOLD, own))
    return (
        f"{name}: effective length {by_ruler} by RULER's threshold, a mean above {RULER_THRESHOLD:.1%} of RULER-11; "
        f"{by_own} by {OWN_SHARE:.0%} of its own mean at {shortest.stop} tokens, {own:.1%}."
    )
