"""How much ``rope-patch fit`` reads: by default, and within a time."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from rope_patch.cli.loading import paces_of, say_estimate


def planned(
    cost: Any, model: Any, budget: int | None, given: set[str], work: Path, *, quiet: bool
) -> tuple[Any, Any, Any]:
    """Return spec and schedule of a fit that the time allows, or the size of the model; and the pace of reading.

    Without a budget steps are as many as asked for, and so is what was chosen on the command line. What a smaller fit
    loses is printed.

    Args:
        cost: of the whole fit.
        model: to be fitted.
        budget: time for all; None for the default [s].
        given: options that were given on the command line.
        work: file of the result cache.
        quiet: nothing is announced; the pace is None then, where there is no budget.
    """
    from rope_patch.evaluation.spec import SCALABLE
    from rope_patch.modeling.budget import SAFETY, default_tokens, pace_of_reading

    pace, length = None, cost.spec.longest
    if budget is not None or not quiet:
        (pace,) = paces_of(model, budget, work, cost.spec.to_dict(), lambda: [pace_of_reading(model, length)])
    if budget is None:
        why, scalable = "for a model of this size", [name for name in SCALABLE if name not in given]
        least = dataclasses.replace(cost, spec=cost.spec.smallest(scalable)).tokens
        smaller = cost.within(max(default_tokens(model), least), scalable, lambda fit: float(fit.tokens))
    else:
        why = "--budget"
        smaller = cost.within(SAFETY * budget, [*SCALABLE, "steps"], lambda fit: float(fit.seconds(pace)))
    if lost := cost.loss_of(smaller):
        print(f"{why}: {lost}", file=sys.stderr)
    return smaller.spec, smaller.schedule, pace


def announced(cost: Any, pace: Any, budget: int | None) -> None:
    """Print how much a fit reads, how long that takes, and what takes less."""
    why = "no table is better than its start, or none answers the prompts of the trained length"
    more = f", and up to {cost.more:,} more if {why}" if cost.more else ""
    whole = cost.objective.positions == "full" and cost.schedule.steps
    advice = "--budget 30m aims at a time" + (", --positions pose takes short rows" if whole else "")
    advice = "" if budget else advice
    say_estimate(cost.tokens, cost.seconds(pace), more, advice)
