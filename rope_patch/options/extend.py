"""The options of ``rope-patch extend``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rope_patch.options import shared
from rope_patch.options.evaluation import EvalSpec
from rope_patch.options.fields import OptionSet, contained, flag, number, option, path, tokens, whole, word
from rope_patch.options.shared import CommandOptions, Machine
from rope_patch.runtime.text import parse_duration

CANDIDATES = (
    *("yarn", "yarn:mscale=1.5:mscale_all_dim=1", "yarn:attention_factor=1"),
    *("ntk", "abf:factor=4", "mrrope", "llama3"),
)
"""Methods that compete by default, beside the checkpoint as it is. The second and third are YaRN with a weaker
attention factor (1.03 and 1 instead of 1.07 at twice the context), which cost less within the context:
docs/results/tables.md."""
CANDIDATES_ON_SCALED = ("yarn", "mrrope", "llama3", "abf:factor=4")
"""Methods that compete by default where the checkpoint scales its table already, beside the one that raises its own
type. On the toys of docs/results/tables.md ``ntk``, and ``pi`` on top of another type, find no passkey."""

DEFAULT_SECONDS = 1800.0
"""The time for measuring the candidates where no budget is given [s]."""


@dataclass(frozen=True)
class ExtendSettings(OptionSet):
    """The settings of a run: the arguments of :func:`rope_patch.extend`, and the contents of ``extend.yaml``.

    The spec holds the length to reach. A run adds shorter lengths, and its rounds decide how much text and how many
    prompts are read. It asks one of the tasks, the first that the unpatched model answers within its context.
    """

    model: str = shared.model()
    length: int = tokens("The context length to reach.", least=2)
    methods: tuple[str, ...] = word(
        'The methods to compare, separated by spaces, for example "yarn:factor=4 p_rope:p=0.5"; rope-patch methods '
        "lists them. The unpatched model is always measured, too.",
        CANDIDATES,
        metavar="METHODS",
        several=True,
        empty=True,
    )
    tolerance: float = number(
        "How much perplexity may rise within the trained context: 0.25 is 25 %. Of methods that are equally good at "
        "the length, the cheapest within the trained context is chosen in any case.",
        0.25,
        metavar="SHARE",
        least=0,
        most=1,
        unit="(0.05 is 5 %)",
    )
    train: bool = flag("Train the best method with LoRA, and let the trained model compete.")
    train_text: str | None = word(
        "With --train: a file, a folder or the hub id of a dataset. By default 400 kB of text that ship with "
        "rope_patch.",
        None,
        metavar="PATH",
    )
    train_rows: int | None = whole(
        "With --train: the number of rows, rounded up to a multiple of 8. By default 200, or as many as half of "
        "--budget has time for.",
        None,
        least=1,
    )
    budget: int | None = option(
        "How long the run may take, such as 5m, 30m or 2h. It measures until then, and chooses by what was measured. "
        "It ends earlier if more text would hardly change the choice. By default 30 minutes of measuring, and with "
        "--train a training of 200 rows.",
        None,
        metavar="TIME",
        read=parse_duration,
        kind=int,
        least=1,
        unit="s",
    )
    for_programs: tuple[str, ...] = shared.programs(
        "A program that will run the checkpoint: transformers-4, vllm, sglang, llama.cpp or mlx. Methods that this "
        "program does not run, from the folder or with options, are left out."
    )
    evaluation: EvalSpec = contained(
        EvalSpec,
        # The needle lies in the text, and rounds decide how many windows are read.
        without=(
            "lengths",
            "depths",
            "samples",
            "windows",
            "short_context",
            "haystack",
            "chat_template",
            "bucket",
            "batch_tokens",
        ),
        # A placeholder: __post_init__ puts the length to reach in its place.
        lengths=(2,),
        tasks=("passkey", "niah"),
    )
    machine: Machine = contained(Machine)

    @property
    def measuring_share(self) -> float:
        """The share of a budget that is for measuring the candidates; a training follows, or the writing."""
        return 0.4 if self.train else 0.9

    @property
    def measuring_seconds(self) -> float:
        """The time for measuring the candidates [s]."""
        if self.budget is None:
            return DEFAULT_SECONDS
        return self.measuring_share * self.budget

    def __post_init__(self) -> None:
        """Check the values, and drop repeated methods and ``"default"``, which is always measured."""
        super().__post_init__()
        methods = tuple(dict.fromkeys(method for method in self.methods if method != "default"))
        if not methods:
            raise ValueError("name a method beside 'default', which is always measured")
        if not self.evaluation.tasks:
            raise ValueError("extend decides by retrieval, too: give a task; rope-patch compare takes perplexity alone")
        given = [name for name in ("train_text", "train_rows") if getattr(self, name) is not None]
        if given and not self.train:
            raise ValueError(f"{given[0]} needs train=True (--train)")
        object.__setattr__(self, "methods", methods)
        object.__setattr__(self, "for_programs", shared.names_in(self.for_programs))
        object.__setattr__(self, "evaluation", replace(self.evaluation, lengths=(self.length,)))


@dataclass(frozen=True)
class ExtendOptions(CommandOptions, command="extend"):
    """Bring a checkpoint to a longer context: measure methods, choose one, write the checkpoint and check it.

    All candidates are measured on little text, the better half on more, until one is ahead. The output folder is a
    checkpoint that plain transformers loads, with a model card that shows the scores before and after, and
    ``report.html``. The output says first what the longer context costs on short texts, then which programs run the
    folder. Nothing is written, and the exit status is 4, if no method reaches the length, the best one costs more than
    --tolerance, or --budget is too short for one window of text; the command then says what would help. If it is
    interrupted, run it again to continue.

    Example: ``rope-patch extend ./llama --length 32k -o ./llama-32k --budget 30m``
    """

    settings: ExtendSettings = contained(ExtendSettings)
    output: Path = shared.new_output()
    config: tuple[Path, ...] = path(
        "The extend.yaml of an earlier run: its options are the defaults of this one.",
        (),
        metavar="FILE",
        name="recipe",
        short=("-c",),
        repeated=True,
    )
    dry_run: bool = flag("Load the model, measure its speed, print what would be read and written, and stop.")
    verbose: bool = flag("Also print the rounds and their tables, as report.html shows them.", short=("-v",))
    force: bool = shared.force()
    report: bool = shared.report()
