"""The options of ``rope-patch finetune``: sections that YAML files hold, with their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rope_patch.options import shared
from rope_patch.options.evaluation import EvalSpec
from rope_patch.options.fields import OptionSet, contained, flag, foreign_section, tokens, whole, word
from rope_patch.options.shared import DTYPES, ImportOptions, Patching
from rope_patch.runtime.text import parse_length


@dataclass(frozen=True)
class ModelOptions(OptionSet):
    """The checkpoint."""

    name: str = word("The checkpoint: a folder, a hub id, or a bundled checkpoint (llama, gemma3).", metavar="MODEL")
    revision: str | None = word("The branch, tag or commit of a hub id.", None)
    dtype: str = word(
        "The data type of weights that are not quantized: bfloat16, float16 or float32.",
        "bfloat16",
        metavar="DTYPE",
        choices=DTYPES[1:],
    )
    attention: str = word(
        "The attention kernel: sdpa, flash (flash_attention_2, a separate package) or eager (keeps all scores in "
        "memory).",
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


@dataclass(frozen=True, kw_only=True)
class DataOptions(OptionSet):
    """The documents, and the positions that their tokens get. How they are packed is said below ``train``."""

    source: str = word(
        "The documents: builtin (400 kB that ship with rope_patch, mostly Python source), a file, a folder (txt, md, "
        "json, jsonl, parquet, csv), or the hub id of a dataset. Texts are in a column text (or the one that "
        "train.dataset_text_field names), conversations in a column messages (or conversations, as in ShareGPT). Of "
        "columns prompt and completion the completion is learned.",
        "builtin",
        metavar="PATH|ID",
    )
    config: str | None = word("The configuration of a hub dataset.", None)
    split: str = word("The split of a hub dataset.", "train")
    documents: int | None = whole(
        "Read only the first so many documents; a hub dataset is then not downloaded as a whole.",
        None,
        least=1,
    )
    allow_short: bool = flag("Train although no document is as long as a row.")
    positions: str = word(
        "full counts from 0; pose and randpos give short rows positions up to patch.target_length: pose skips ahead "
        "between pieces of a row (PoSE, arXiv:2309.10400), randpos draws all positions (arXiv:2305.16843).",
        "full",
        choices=("full", "pose", "randpos"),
    )
    chunks: int = whole("The number of pieces that pose cuts a row into.", 2, least=1)


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
        "Also evaluate the model without its adapter, unpatched and patched. With lora.r=0 there is no adapter.", True
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
        EvalSpec, without=("lengths", "tasks", "short_context", "bucket", "batch_tokens"), lengths=(2,), windows=8
    )


RENAMED = {
    "data.length": "write train.max_length",
    "data.boundaries": "write train.packing_strategy=wrapped (documents of a row are joined) or bfd_split (kept apart)",
    "data.learn": "write train.assistant_only_loss=true",
    "data.column": "write train.dataset_text_field for texts, and name a column of conversations messages",
    "data.shuffle": "write train.shuffle_dataset",
    "lora.rank": "write lora.r",
    "lora.alpha": "write lora.lora_alpha",
    "lora.dropout": "write lora.lora_dropout",
    "train.steps": "write train.max_steps",
    "train.batch": "write train.per_device_train_batch_size",
    "train.accumulate": "write train.gradient_accumulation_steps",
    "train.scheduler": "write train.lr_scheduler_type",
    "train.warmup": "write train.warmup_steps",
    "train.optimizer": "write train.optim",
    "train.precision": "write train.bf16=true, train.fp16=true, or train.bf16=false for float32",
    "train.checkpointing": "write train.gradient_checkpointing",
    "train.liger": "write train.use_liger_kernel",
    "train.save_every": "write train.save_steps",
    "train.keep": "write train.save_total_limit",
    "train.log_every": "write train.logging_steps",
}
"""The options of version 0.3 that TRL and PEFT have under names of their own."""

REFUSED = {
    "train.output_dir": "write output",
    "train.resume_from_checkpoint": "the same command continues from the last checkpoint",
    "train.model_init_kwargs": "the recipe loads the model itself: write model.dtype, model.attention and so on",
}
"""Arguments of TRL that a run would ignore, and what to write or do."""


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(OptionSet):
    """All options of a run, as its YAML files hold them.

    Raises:
        ValueError: a value is out of its range, or two values exclude each other.
    """

    aliases: ClassVar = {"output_dir": "output"}
    renamed: ClassVar = RENAMED | REFUSED

    model: ModelOptions = contained(ModelOptions, section=True)
    patch: PatchOptions = contained(PatchOptions, section=True)
    lora: dict[str, Any] = foreign_section(
        "The adapters: arguments of PEFT's LoraConfig, such as r and lora_alpha. r=0 trains every weight instead.", None
    )
    data: DataOptions = contained(DataOptions, section=True)
    train: dict[str, Any] = foreign_section(
        "The training: arguments of TRL's SFTConfig, such as max_steps. max_length, the length of the rows, is needed.",
        None,
        needs=("max_length=TOKENS",),
    )
    evaluation: EvaluationOptions = contained(EvaluationOptions, section=True)
    output: Path = shared.new_output(
        "The folder of the adapter, its card and its scores; checkpoints and logs are in its subfolder work."
    )

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        train = dict(self.train or {})
        if train.get("max_length") is None:
            raise ValueError("train.max_length is missing: the length of the rows, such as 32k")
        train["max_length"] = parse_length(str(train["max_length"]))
        # The dataclass is frozen, so an ordinary assignment raises.
        object.__setattr__(self, "train", train)
        object.__setattr__(self, "lora", dict(self.lora or {}))
        self._check_rows()
        self._check_weights()

    def _check_rows(self) -> None:
        target = self.target_length
        if self.max_length > target:
            raise ValueError(
                f"rows of {self.max_length} tokens are longer than patch.target_length={target}, the context that the "
                "model is patched for: give a shorter train.max_length or a longer patch.target_length"
            )
        positions = self.data.positions
        if positions == "full":
            return
        if self.patch.patching.target_length is None:
            raise ValueError(f"data.positions={positions} needs patch.target_length: positions are drawn from below it")
        if self.train.get("packing_strategy", "wrapped") != "wrapped":
            raise ValueError(f"data.positions={positions} needs train.packing_strategy=wrapped")

    def _check_weights(self) -> None:
        if self.lora_rank:
            return
        if self.model.quantization != "none":
            raise ValueError("lora.r=0 trains every weight: that excludes model.quantization")
        if self.model.dtype != "float32":
            raise ValueError(
                f"lora.r=0 trains the model's own weights, and {self.model.dtype} would round their small updates "
                "away: set model.dtype=float32 (train.bf16 still sets the arithmetic)"
            )

    @property
    def max_length(self) -> int:
        """The length of the rows [tokens]."""
        length: int = self.train["max_length"]
        return length

    @property
    def max_steps(self) -> int:
        """The number of steps of the optimizer.

        Raises:
            ValueError: it is no whole number.
        """
        steps = self.train.get("max_steps", 500)
        if not isinstance(steps, int):
            raise ValueError(f"train.max_steps must be a whole number, got {steps!r}")
        return steps

    @property
    def lora_rank(self) -> int:
        """The rank of the adapters; 0 if every weight is trained.

        Raises:
            ValueError: it is no whole number.
        """
        rank = self.lora.get("r", 16)
        if not isinstance(rank, int):
            raise ValueError(f"lora.r must be a whole number, got {rank!r}")
        return rank

    @property
    def target_length(self) -> int:
        """The context length that the model is patched for [tokens]."""
        return self.patch.patching.target_length or self.max_length

    @property
    def evaluation_lengths(self) -> tuple[int, ...]:
        """The prompt lengths of the evaluation, in rising order [tokens]."""
        return tuple(sorted(self.evaluation.lengths or (self.target_length,)))


@dataclass(frozen=True)
class FinetuneOptions(ImportOptions, command="finetune"):
    """Fine-tune a patched checkpoint at a longer context with LoRA or QLoRA.

    The result is an adapter with its patch and with the scores before and after training. If the run is interrupted,
    run the same command again to continue from the last checkpoint. Options come from YAML files, from single values
    such as ``train.max_steps=100``, and from flags; later ones replace earlier ones. Section ``train`` takes options of
    TRL's SFTConfig, section ``lora`` options of PEFT's LoraConfig. Three options are required: ``model.name``,
    ``train.max_length`` (the length of the rows) and ``output``. ``finetune_lora.py`` of ``rope-patch recipes copy`` is
    the script that runs, and ``configs`` beside it has a file for each situation.

    Example: ``rope-patch finetune model.name=./llama patch.method=yarn:factor=4 train.max_length=16k output=out``
    """

    aliases: ClassVar = RecipeOptions.aliases
    renamed: ClassVar = RecipeOptions.renamed

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
        "Print the patch, the steps, the predicted memory and the options, refuse what a run would refuse before its "
        "first step, and stop. No weights are loaded."
    )
    restart: bool = flag("Delete an earlier run in the output folder and start again.")
    gpu_memory: float = shared.gpu_memory()
    threads: int | None = whole("The number of CPU threads. If it is not given, PyTorch decides.", None, least=1)
