"""How much a fit reads, and how long that takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from rope_patch.evaluation.spec import SCALABLE, WINDOWS, EvalSpec
from rope_patch.fitting.rows import FULL, longest_row, tokens_of_step
from rope_patch.fitting.running import checks
from rope_patch.modeling.budget import Pace

BACKWARD = 2.4
"""Time of a step over that of reading its rows: forward and backward pass, which computes no gradients of the weights.
It is what the bundled Llama and SmolLM2-135M took on a CPU, whole rows and rows with skipped positions alike."""

LEAST_STEPS = 10
"""Steps that a fit has at least, however little time there is."""


@dataclass(frozen=True)
class FitCost:
    """What a fit reads.

    Attributes:
        spec: what tables are evaluated on.
        trained_length: shortest length of a row [tokens].
        steps: number of steps.
        positions: of the rows, ``"full"`` or ``"pose"``.
    """

    spec: EvalSpec
    trained_length: int
    steps: int = 40
    positions: str = "full"

    @property
    def fitted(self) -> int:
        """The tokens of all steps."""
        return self.steps * tokens_of_step(self.positions, self.trained_length, self.spec.longest)

    @property
    def evaluations(self) -> int:
        """How often a table is evaluated: the start, the checks, and the average where it is one of several steps.

        Where none of these is better than the start, up to three others are.
        """
        return 1 + len(checks(self.steps)) + (self.steps - (self.steps + 1) // 2 > 1)

    @property
    def tokens(self) -> int:
        """The tokens of all steps and evaluations; the windows of the second domain are as many as of the first."""
        once = self.spec.tokens_to_read() + (self.spec.windows or WINDOWS) * self.spec.longest
        return self.fitted + self.evaluations * once

    def seconds(self, pace: Pace) -> float:
        """Return how long reading :attr:`tokens` takes [s].

        Args:
            pace: at which the model reads.
        """
        longest, trained = longest_row(self.positions, self.trained_length, self.spec.longest), self.trained_length
        row: float = longest
        if self.positions == "full" and longest > trained:  # half of the rows: evenly on a logarithmic scale
            row = FULL * longest + (1 - FULL) * (longest - trained) / math.log(longest / trained)
        steps = BACKWARD * pace.seconds(self.fitted, round(row))
        second = (self.spec.windows or WINDOWS) * self.spec.longest
        once = self.spec.seconds(pace) + pace.seconds(second, self.spec.longest)
        return steps + self.evaluations * once

    def within(self, most: float, price: Callable[[FitCost], float], *, fewer_steps: bool) -> FitCost:
        """Return a fit to the same length that costs at most so much.

        Windows and samples become fewer first; where that is not enough, steps do too, if they may.

        Args:
            most: at most, in the unit of the price.
            price: of a fit.
            fewer_steps: whether steps may become fewer.

        Raises:
            ValueError: the smallest fit costs more.
        """
        shares = (1, 3 / 4, 1 / 2, 3 / 8, 1 / 4) if fewer_steps else (1,)
        for steps in (max(round(self.steps * share), min(self.steps, LEAST_STEPS)) for share in shares):
            for spec in self.spec.smaller(SCALABLE):
                fit = replace(self, spec=spec, steps=steps)
                if price(fit) <= most:
                    return fit
        raise ValueError(
            f"the smallest fit to {self.spec.longest} tokens reads {fit.tokens} tokens, which is "
            f"{price(fit) / max(most, 1e-9):.1f} times what fits into the time: give more time, a shorter length, or "
            "--positions pose"
        )
