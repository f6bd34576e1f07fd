"""The options of ``rope-patch compare``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rope_patch.options import shared
from rope_patch.options.evaluation import EvalSpec
from rope_patch.options.fields import OptionSet, contained
from rope_patch.options.shared import Machine, Patching


@dataclass(frozen=True)
class CompareOptions(OptionSet, command="compare"):
    """Compare methods on one model: perplexity by position in the text, and retrieval by prompt length.

    Every method reads the same texts and prompts. The command writes ``comparison.json`` and ``report.html``. If it is
    interrupted, run it again to continue: finished work is saved in the output folder.

    Example: ``rope-patch compare ./llama --methods "default yarn:factor=4" --lengths "4k 16k" -o ./compared``
    """

    model: str = shared.model()
    methods: tuple[str, ...] = shared.methods()
    evaluation: EvalSpec = contained(EvalSpec)
    output: Path = shared.output("rope-patch-compare")
    patching: Patching = contained(Patching, without=("target_length",))
    budget: int | None = shared.budget()
    machine: Machine = contained(Machine)
    report: bool = shared.report()
    imports: tuple[str, ...] = shared.imports()
    as_json: bool = shared.as_json()
