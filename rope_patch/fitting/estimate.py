"""How much a fit reads, and how long that takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rope_patch.evaluation.spec import WINDOWS, EvalSpec
from rope_patch.fitting.rows import Objective
from rope_patch.fitting.running import WAYS
from rope_patch.modeling.budget import Pace
from rope_patch.processes import processes

if TYPE_CHECKING:
    from rope_patch.fitting import Schedule

BACKWARD, RECOMPUTED = 2.4, 3.4
"""Time of a step over that of reading its rows: forward and backward pass, and with gradient checkpointing the forward
pass once more. The weights are frozen, so that the backward pass computes no gradients of them. 2.4 is what the bundled
Llama and SmolLM2-135M took on a CPU, whole rows and rows with skipped positions alike (three runs, seen by hand)."""

LEAST_STEPS = 10
"""Steps that a fit has at least, however little time there is."""


def averages(steps: int) -> bool:
    """Whether a fit has enough steps in its second half for an average over them."""
    return steps - (steps + 1) // 2 > 1


def evaluations(steps: int, checks: int) -> int:
    """Return how often a fit from one start evaluates a table if it is not stopped: the start, checks, and average.

    >>> evaluations(40, 2), evaluations(3, 2), evaluations(0, 2)
    (4, 3, 1)
    """
    stops = {round(steps * (i + 1) / checks) for i in range(checks)} - {0}
    return 1 + len(stops) + averages(steps)


@dataclass(frozen=True)
class FitCost:
    """What a fit reads.

    Attributes:
        spec: what tables are evaluated on.
        objective: what is minimised.
        schedule: how a table is trained.
        trained_length: shortest length of a row [tokens].
        windows: of held-out text; by default as many as the spec asks for.
        second: windows of the second domain; by default as many as of held-out text.
        starts: number of tables that a fit starts from.
    """

    spec: EvalSpec
    objective: Objective
    schedule: Schedule
    trained_length: int
    windows: int | None = None
    second: int | None = None
    starts: int = 1

    @property
    def _windows(self) -> tuple[int, int]:
        asked = WINDOWS if self.spec.windows is None else self.spec.windows
        windows = asked if self.windows is None else self.windows
        return windows, windows if self.second is None else self.second

    @property
    def fitted(self) -> int:
        """The tokens of all steps from one start."""
        step = self.schedule.tokens_of_step(self.objective, self.trained_length, self.spec.longest)
        return self.schedule.steps * step

    @property
    def evaluated(self) -> int:
        """The tokens of one evaluation."""
        windows, second = self._windows
        return self.spec.tokens_to_read(windows) + second * self.spec.longest

    @property
    def tokens(self) -> int:
        """The tokens of all steps and evaluations."""
        count = evaluations(self.schedule.steps, self.schedule.checks)
        return self.starts * (self.fitted + count * self.evaluated)

    @property
    def more(self) -> int:
        """The tokens that are read in addition, at most.

        Where no table is better than its start, others are tried; where none answers the prompts within the trained
        length, the unpatched model is asked these.
        """
        return self.starts * len(WAYS) * self.evaluated * averages(self.schedule.steps) + self.unpatched

    @property
    def unpatched(self) -> int:
        """The tokens of the prompts within the trained length."""
        within = [length for length in self.spec.lengths if length <= self.trained_length]
        return replace(self.spec, lengths=within).tokens_to_read(0) if within else 0

    def seconds(self, pace: Pace) -> float:
        """Return how long reading :attr:`tokens` takes [s]; several processes share the steps.

        Args:
            pace: at which the model reads.
        """
        longest = self.objective.longest_row(self.trained_length, self.spec.longest)
        row: float = longest
        if self.objective.positions == "full" and longest > self.trained_length:  # others: even on a logarithmic scale
            drawn = (longest - self.trained_length) / math.log(longest / self.trained_length)
            row = self.objective.full * longest + (1 - self.objective.full) * drawn
        times = (RECOMPUTED if self.schedule.checkpointing else BACKWARD) / processes()[1]
        steps = times * pace.seconds(self.fitted, round(row))
        windows, second = self._windows
        longest = self.spec.longest
        once = self.spec.seconds(pace, windows) + pace.seconds(second * longest, longest)
        return self.starts * (steps + evaluations(self.schedule.steps, self.schedule.checks) * once)

    def within(self, most: float, scalable: Collection[str], price: Callable[[FitCost], float]) -> FitCost:
        """Return a fit to the same length that costs at most so much.

        Windows and samples become fewer first; where that is not enough, steps do too.

        Args:
            most: at most, in the unit of the price.
            scalable: of ``windows``, ``samples`` and ``steps``, those that may become fewer.
            price: of a fit.

        Raises:
            ValueError: the smallest fit costs more.
        """
        steps = self.schedule.steps
        counts = [steps, *(round(steps * share) for share in (3 / 4, 1 / 2, 3 / 8, 1 / 4))]
        fewer = [count for count in counts if count >= min(steps, LEAST_STEPS)] if "steps" in scalable else [steps]
        for count in fewer:
            fit = replace(self, schedule=replace(self.schedule, steps=count))
            for spec in self.spec.smaller(scalable):
                if price(replace(fit, spec=spec)) <= most:
                    return replace(fit, spec=spec)
        least = replace(fit, spec=self.spec.smallest(scalable))
        raise ValueError(
            f"the smallest fit to {self.spec.longest} tokens reads {least.tokens} tokens, which is "
            f"{price(least) / max(most, 1e-9):.1f} times what fits into the time: give more time, or a shorter length"
            + (", or --positions pose" if self.objective.positions == "full" else "")
        )

    def loss_of(self, smaller: FitCost) -> str:
        """Return what is lost with a fit of :meth:`within`, as a sentence; "" where nothing is."""
        before, after = self.schedule.steps, smaller.schedule.steps
        parts = [self.spec.cost_of(smaller.spec), f"{after} instead of {before} steps" if after < before else ""]
        return "; ".join(part for part in parts if part)
