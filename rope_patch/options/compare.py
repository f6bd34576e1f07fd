"""The options of ``rope-patch compare``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rope_patch.options import shared
from rope_patch.options.evaluation import EvalSpec
from rope_patch.options.fields import OptionSet, contained, word
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
    evaluator: str | None = word(
        "For LongPPL: another model that chooses the tokens, of the same tokenizer and a longer context. By default it "
        "is MODEL without a patch, within its own context.",
        None,
        metavar="MODEL",
        name="longppl-evaluator",
    )
    patching: Patching = contained(Patching, without=("target_length",))
    budget: int | None = shared.budget()
    machine: Machine = contained(Machine)
    report: bool = shared.report()
    imports: tuple[str, ...] = shared.imports()
    as_json: bool = shared.as_json()

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if self.evaluator is not None and not self.evaluation.longppl:
            raise ValueError("--longppl-evaluator chooses the tokens of LongPPL: give --longppl too")
