"""The result of :func:`rope_patch.extend`: what was measured, chosen and written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rope_patch.evaluation.compare import Comparison
from rope_patch.extending.choose_method import Choice
from rope_patch.extending.train_adapter import Training
from rope_patch.options.extend import ExtendSettings


@dataclass(frozen=True)
class Extended:
    """The result of a run: the choice, its evidence, and the folder that was written.

    Attributes:
        output: the folder that was written; None where no method could be chosen.
        choice: the method that was chosen, and why; or why none was.
        comparisons: the comparison of every round; the last one has the adapted model too, where one was trained.
        trained_length: the context of the model before the run [tokens].
        training: the rows and steps of the training; None where nothing was trained.
        work: the folder of the finished measurements, which may be deleted.
        options: the options of the run.
        programs: the programs that compute another table than transformers 5 from the folder, a sentence each.
    """

    output: Path | None
    choice: Choice
    comparisons: tuple[Comparison, ...]
    trained_length: int
    training: Training | None
    work: Path
    options: ExtendSettings
    programs: tuple[str, ...] = ()

    @property
    def comparison(self) -> Comparison:
        """The scores that the choice rests on."""
        return self.comparisons[-1]
