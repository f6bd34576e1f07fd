"""The result of :func:`rope_patch.extend`: what was measured, chosen and written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rope_patch.evaluation.compare import Comparison
from rope_patch.extending.choose import Choice
from rope_patch.extending.train_adapter import Training
from rope_patch.options.extend import ExtendSettings


@dataclass(frozen=True)
class Extended:
    """The result of a run: the choice, its evidence, and the folder that was written.

    Attributes:
        options: the options of the run.
        trained_length: the context of the model before the run [tokens].
        work: the folder of the finished measurements, which may be deleted.
        comparisons: the comparison of every round; the last one has the adapted model too, where one was trained. None
            where the budget had no time for a single window.
        choice: the method that was chosen, in numbers; None without a comparison.
        verdict: why it was chosen, the price first, or why none was, and what would help: sentences.
        training: the rows and steps of the training; None where nothing was trained.
        output: the folder that was written; None where no method could be chosen.
    """

    options: ExtendSettings
    trained_length: int
    work: Path
    comparisons: tuple[Comparison, ...]
    choice: Choice | None = None
    verdict: tuple[str, ...] = ()
    training: Training | None = None
    output: Path | None = None

    @property
    def comparison(self) -> Comparison:
        """The scores that the choice rests on."""
        return self.comparisons[-1]

    def __str__(self) -> str:
        """Return the verdict, a sentence a line."""
        return "\n".join(self.verdict)
