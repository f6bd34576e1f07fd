"""The options of ``rope-patch finetune``: sections that YAML files hold, with their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rope_patch.options import shared
from rope_patch.options.evaluation import EvalSpec
from rope_patch.options.fields import OptionSet, contained, flag, number, tokens, whole, word
from rope_patch.options.plan import ALL_LINEAR
from rope_patch.options.shared import ImportOptions, Patching

PRECISIONS = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class ModelOptions(OptionSet):
    """The checkpoint."""

    name: str = word("The checkpoint: a folder, a hub id, or a bundled checkpoint (llama, gemma3).", metavar="MODEL")
    revision: str | None = word("The branch, tag or commit of a hub id.", None)
    dtype: str = word(
        "The data type of weights that are not quantized: bfloat16, float16 or float32.",
        "bfloat16",
        metavar="DTYPE",
        choices=PRECISIONS,
    )
    attention: str = word(
        "The attention kernel: sdpa, flash (flash_attention_2, a package of its own) or eager (it holds all scores).",
        "sdpa",
        metavar="KERNEL",
        choices=("sdpa", "flash", "eager"),
    )
    quantization: str = word(
        "The quantization of the frozen weights by bitsandbytes: nf4 (QLoRA) or 8bit take a quarter or half of the "
        "memory, and are slower.",
        "none",
        metavar="KIND",
        choices=("none", "8bit", "nf4"),
    )
    trust_remote_code: bool = flag("Run code that comes with the checkpoint.")


@dataclass(frozen=True)
class PatchOptions(OptionSet):
    """The rotary patch."""

    method: str | None = word(
        "A method string, NAME:key=value (rope-patch methods lists them). Without one the checkpoint keeps its own "
        "patch or, where it has none, its original table.",
        None,
        metavar="METHOD",
    )
    patching: Patching = contained(Patching)
    replace: bool = flag("Replace an earlier patch.")


@dataclass(frozen=True)
class LoraOptions(OptionSet):
    """The weights that are trained."""

    rank: int = whole("The rank of the adapters. 0 trains every weight, and adds no adapter.", 16, least=0)
    alpha: int | None = whole(
        "LoRA's alpha: the scale of the adapters times their rank. By default twice the rank.", None, least=1
    )
    dropout: float = number(
        "The dropout on the input of the adapters. Above 0 it takes memory on long rows.", 0.0, least=0, most=1
    )
    target_modules: tuple[str, ...] = word(
        "The projections that get an adapter: all-linear (attention and MLP), attention, or names.",
        (ALL_LINEAR,),
        metavar="NAMES",
        several=True,
    )


@dataclass(frozen=True, kw_only=True)
class DataOptions(OptionSet):
    """The documents, and the rows of tokens that they are packed into."""

    source: str = word(
        "The documents: builtin (400 kB that ship with rope_patch, mostly Python source), a file, a folder (txt, md, "
        "json, jsonl, parquet, csv), or the hub id of a dataset.",
        "builtin",
        metavar="PATH|ID",
    )
    config: str | None = word("The configuration of a hub dataset.", None)
    split: str = word("The split of a hub dataset.", "train")
    column: str = word("The column that holds the text; lists of messages are rendered with the chat template.", "text")
    learn: str = word(
        "The tokens of a conversation that count in the loss: all, or assistant (its turns alone).",
        "all",
        choices=("all", "assistant"),
    )
    shuffle: bool = flag("Shuffle the documents, by train.seed.", True)
    length: int = tokens("The length of the rows, such as 32k.", least=2)
    boundaries: str = shared.boundaries()
    allow_short: bool = flag("Train although no document is as long as a row.")
    positions: str = word(
        "full counts from 0; pose gives short rows positions up to patch.target_length (PoSE, arXiv:2309.10400).",
        "full",
        choices=("full", "pose"),
    )
    chunks: int = whole("The pieces of a row under pose.", 2, least=1)


@dataclass(frozen=True)
class TrainOptions(OptionSet):
    """The optimizer and its steps."""

    steps: int = whole("The steps of the optimizer.", 500, least=1)
    batch: int = whole("Rows per forward pass and device; memory grows with it.", 1, least=1)
    accumulate: int = whole("Forward passes per step; time grows with it, memory does not.", 8, least=1)
    learning_rate: float = number("The highest learning rate that the scheduler reaches.", 2e-4, above=0)
    scheduler: str = word(
        "The scheduler of transformers, such as constant_with_warmup, linear or cosine.", "constant_with_warmup"
    )
    warmup: float | None = number(
        "The warm-up steps; below 1, a share of all steps. By default 20, and a fifth of a run at most.", None, least=0
    )
    optimizer: str = word(
        "The optimizer: adamw, adamw_8bit or paged_adamw_8bit (bitsandbytes; a quarter of the memory of its states), "
        "or sgd (which has no states).",
        "adamw",
        choices=("adamw", "adamw_8bit", "paged_adamw_8bit", "sgd"),
    )
    weight_decay: float = number("The weight decay of AdamW.", 0.0, least=0)
    max_grad_norm: float = number("Gradients are clipped to this norm.", 1.0, least=0)
    precision: str = word(
        "The data type of the arithmetic; float32 turns autocast off.",
        "bfloat16",
        metavar="DTYPE",
        choices=PRECISIONS,
    )
    checkpointing: bool = flag(
        "Compute each layer again in the backward pass: far less memory, and a third more time.", True
    )
    liger: bool = flag("Use Liger's kernels for norms and MLPs; it needs a GPU and the extra gpu.")
    seed: int = whole("The seed of adapters, order and positions.", 0, metavar="NUMBER", least=0)
    save_every: int | None = whole(
        "The steps between checkpoints. By default evaluation.every, or a fifth of the run.", None, least=1
    )
    keep: int = whole("The number of checkpoints that are not deleted, the best one among them.", 2, least=1)
    log_every: int = whole("The steps between lines of the log.", 5, least=1)


@dataclass(frozen=True)
class EvaluationOptions(OptionSet):
    """How the model is evaluated, during training and at the end; no prompt of training is among the prompts."""

    every: int = whole(
        "The steps between evaluations. The checkpoint with the best retrieval (then perplexity) is saved at the end. "
        "0 evaluates at the end only.",
        0,
        least=0,
    )
    before: bool = flag(
        "Evaluate the model without its adapter, too, unpatched and patched. With lora.rank=0 there is none.", True
    )
    lengths: tuple[int, ...] | None = tokens(
        'The prompt lengths, such as "4k 16k 32k"; perplexity is measured at the positions between them. By default '
        "the length that the model is patched for.",
        None,
        several=True,
        least=2,
    )
    task: str = word("The retrieval task.", "passkey")
    # The length is a placeholder: a run puts in the lengths and the task from above.
    spec: EvalSpec = contained(
        EvalSpec, without=("lengths", "tasks", "bucket", "batch_tokens"), lengths=(2,), windows=8
    )


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(OptionSet):
    """All options of a run, as its YAML files hold them.

    Raises:
        ValueError: a value is out of its range, or two values exclude each other.
    """

    model: ModelOptions = contained(ModelOptions, section=True)
    patch: PatchOptions = contained(PatchOptions, section=True)
    lora: LoraOptions = contained(LoraOptions, section=True)
    data: DataOptions = contained(DataOptions, section=True)
    train: TrainOptions = contained(TrainOptions, section=True)
    evaluation: EvaluationOptions = contained(EvaluationOptions, section=True)
    output: Path = shared.new_output(
        "The folder of the adapter, its card and its scores; checkpoints and logs are in its subfolder work."
    )

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        self._check_rows()
        self._check_weights()
        if self.evaluation.every and self.save_every != self.evaluation.every:
            raise ValueError(
                f"train.save_every={self.save_every} must equal evaluation.every={self.evaluation.every}, or be left "
                "out: the checkpoint with the best evaluation can only be kept if it is saved"
            )

    def _check_rows(self) -> None:
        data = self.data
        target = self.target_length
        if data.length > target:
            raise ValueError(
                f"rows of {data.length} tokens are longer than patch.target_length={target}, the context that the "
                "model is patched for: give a shorter data.length or a longer patch.target_length"
            )
        if data.positions == "full":
            return
        if self.patch.patching.target_length is None:
            raise ValueError("data.positions=pose needs patch.target_length: positions are drawn from below it")
        if data.boundaries == "apart":
            raise ValueError("data.positions=pose needs data.boundaries=join, not apart")

    def _check_weights(self) -> None:
        if self.lora.rank:
            return
        if self.model.quantization != "none":
            raise ValueError("lora.rank=0 trains every weight: that excludes model.quantization")
        if self.model.dtype != "float32":
            raise ValueError(
                f"lora.rank=0 trains the model's own weights, and {self.model.dtype} would round their small updates "
                "away: set model.dtype=float32 (train.precision still sets the arithmetic)"
            )

    @property
    def target_length(self) -> int:
        """The context length that the model is patched for [tokens]."""
        return self.patch.patching.target_length or self.data.length

    @property
    def warmup_steps(self) -> int:
        """The number of steps over which the learning rate rises."""
        warmup = self.train.warmup
        if warmup is None:
            return min(20, self.train.steps // 5)
        if warmup < 1:
            return round(warmup * self.train.steps)
        return int(warmup)

    @property
    def save_every(self) -> int:
        """The number of steps between checkpoints."""
        return self.train.save_every or self.evaluation.every or max(1, self.train.steps // 5)

    @property
    def evaluation_lengths(self) -> tuple[int, ...]:
        """The prompt lengths of the evaluation, in rising order [tokens]."""
        return tuple(sorted(self.evaluation.lengths or (self.target_length,)))


@dataclass(frozen=True)
class FinetuneOptions(ImportOptions, command="finetune"):
    """Fine-tune a patched checkpoint at a longer context with LoRA or QLoRA.

    The result is an adapter with its patch and with the scores before and after training. If the run is interrupted,
    run the same command again to continue from the last checkpoint. Options come from YAML files, from single values
    such as ``train.steps=100``, and from flags; later ones replace earlier ones. Three are required: ``model.name``,
    ``data.length`` (the length of the rows) and ``output``. ``lora.yaml`` of ``rope-patch recipes copy``
    has all of them with their defaults.

    Example: ``rope-patch finetune model.name=./llama patch.method=yarn:factor=4 data.length=16k output=out``
    """

    recipe: RecipeOptions = contained(RecipeOptions)
    config: tuple[str, ...] = word(
        "The options of the run, as YAML files and as single values. Later ones replace earlier ones.",
        (),
        metavar="FILE.yaml | KEY=VALUE",
        positional=True,
        repeated=True,
    )
    smoke: bool = flag("Try the run in about a minute on a CPU: a small bundled checkpoint and few steps.")
    dry_run: bool = flag(
        "Print the options and the predicted memory, refuse what a run would refuse before its first step, and stop. "
        "No weights are loaded."
    )
    restart: bool = flag("Delete an earlier run in the output folder and start again.")
    gpu_memory: float = shared.gpu_memory()
    threads: int | None = whole("The number of CPU threads. If it is not given, PyTorch decides.", None, least=1)
