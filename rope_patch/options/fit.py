"""The options of ``rope-patch fit``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rope_patch.options import shared
from rope_patch.options.fields import OptionSet, contained, number, path, tokens, whole, word
from rope_patch.options.shared import Machine


@dataclass(frozen=True)
class FitSettings(OptionSet):
    """The settings of a fit, which are the arguments of :func:`rope_patch.fit`."""

    target_length: int = tokens("The context length to fit the table to, such as 8k.", name="length")
    init: str = word("The method whose table the fit starts from.", "yarn", metavar="METHOD")
    retrieval: float = number(
        "The share of each update that comes from the loss of answers to retrieval prompts, at least 0 and less than "
        "1; the rest comes from the loss of text. With 0 no prompt takes part: such fits lose retrieval, and were "
        "found worse on text of another kind.",
        0.8,
        metavar="SHARE",
        least=0,
        below=1,
    )
    positions: str = word(
        "full: the rows of the fit are long, up to the target length. pose: they are short, and their position numbers "
        "jump ahead, so that distances up to the target length occur in them (PoSE, Zhu et al. 2023); a step then "
        "takes about the same time and memory at every target length.",
        "full",
        metavar="full|pose",
        choices=("full", "pose"),
    )
    steps: int = whole("The number of optimizer steps; 0 only measures the starting table.", 40, least=0)
    seed: int = shared.seed()


@dataclass(frozen=True)
class FitOptions(OptionSet, command="fit"):
    """Fit the rotary table of a checkpoint to a longer context by gradient descent; the weights do not change.

    The fit learns from pieces of text and from retrieval prompts made of them. The last tenth of the text is held out
    to evaluate tables on, and so is the documentation of Python: the table that is chosen is no worse than the starting
    table on either text, and does not answer significantly fewer prompts. A gain on text like that of the fit need not
    carry over to other text: compare the result with its start on your own text. The result is a patched copy of the
    checkpoint that plain transformers loads; ``fit.json`` holds the measurements. If the command is interrupted,
    nothing is written.

    Example: ``rope-patch fit ./llama --length 8k --text ./books -o ./llama-8k``
    """

    model: str = shared.checkpoint()
    settings: FitSettings = contained(FitSettings)
    output: Path = shared.new_output("The folder to write, new or empty.")
    text: Path | None = path("A text file, or a folder of .txt files, to fit to. By default, Python's own code.", None)
    machine: Machine = contained(Machine, without=("threads",))
    imports: tuple[str, ...] = shared.imports()
