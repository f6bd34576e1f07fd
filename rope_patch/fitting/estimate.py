"""How much a fit reads, and how long that takes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rope_patch.evaluation.spec import WINDOWS, EvalSpec
from rope_patch.fitting.rows import Objective
from rope_patch.modeling.budget import Pace
from rope_patch.processes import processes

if TYPE_CHECKING:
    from rope_patch.fitting import Schedule

BACKWARD, RECOMPUTED = 2.4, 3.4
"""Time of a step over that of reading its rows: forward and backward pass, and with gradient checkpointing the forward
pass once more. The weights are frozen, so that the backward pass computes no gradients of them. 2.4 is what the bundled
Llama and SmolLM2-135M took on a CPU, whole rows and rows with skipped positions alike (three runs, seen by hand)."""


def evaluations(steps: int, checks: int) -> int:
    """Return how often a fit from one start evaluates a table, where it is not stopped early.

    The start, the checks, and the average over the steps; where the average is worse than the start, points between
    both are evaluated in addition, up to three.

    >>> evaluations(40, 2), evaluations(0, 2)
    (4, 1)
    """
    stops = {round(steps * (i + 1) / checks) for i in range(checks)} - {0}
    return 1 + len(stops) + (steps > 1)


def cost_of_fit(
    pace: Pace,
    spec: EvalSpec,
    objective: Objective,
    schedule: Schedule,
    *,
    trained_length: int,
    second: bool = True,
    starts: int = 1,
) -> tuple[int, float]:
    """Return the tokens that a fit reads, and how long that takes [s].

    Args:
        pace: at which the model reads.
        spec: what tables are evaluated on.
        objective: what is minimised.
        schedule: how a table is trained.
        trained_length: shortest length of a row [tokens].
        second: whether tables are evaluated on a second domain, too.
        starts: number of tables that a fit starts from.
    """
    longest = objective.longest_row(trained_length, spec.longest)
    row: float = longest
    if objective.positions == "full" and longest > trained_length:  # the others are even on a logarithmic scale
        drawn = (longest - trained_length) / math.log(longest / trained_length)
        row = objective.full * longest + (1 - objective.full) * drawn
    fitted = schedule.steps * schedule.tokens_of_step(objective, trained_length, spec.longest)
    times = (RECOMPUTED if schedule.checkpointing else BACKWARD) / processes()[1]
    seconds = times * pace.seconds(fitted, round(row))
    count = evaluations(schedule.steps, schedule.checks)
    windows = second * (WINDOWS if spec.windows is None else spec.windows) * spec.longest
    seconds += count * (spec.seconds(pace) + pace.seconds(windows, spec.longest))
    return starts * (fitted + count * (spec.tokens_to_read() + windows)), starts * seconds
