"""How much a fit reads."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rope_patch.evaluation.spec import SCALABLE, WINDOWS, smaller, tokens_to_read
from rope_patch.fitting.rows import tokens_of_step
from rope_patch.fitting.running import checks
from rope_patch.options.evaluation import EvalSpec


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
        once = tokens_to_read(self.spec) + (self.spec.windows or WINDOWS) * self.spec.longest
        return self.fitted + self.evaluations * once

    def within(self, most: int) -> FitCost:
        """Return a fit with as many windows and samples as a number of tokens allows, and at least the fewest."""
        fits = [replace(self, spec=spec) for spec in smaller(self.spec, SCALABLE)]
        return next((fit for fit in fits if fit.tokens <= most), fits[-1])
