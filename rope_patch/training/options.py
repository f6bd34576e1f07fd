"""What a training run depends on: typed options from YAML files and ``key=value`` words."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from rope_patch.evaluation.spec import check_retrieval
from rope_patch.evaluation.tasks import find_task
from rope_patch.methods import as_method
from rope_patch.training.data import Boundaries
from rope_patch.words import did_you_mean, parse_length

Precision = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True)
class ModelOptions:
    """The checkpoint.

    Attributes:
        name: folder, hub id, or a bundled checkpoint (``llama``, ``gemma3``).
        revision: of a hub id.
        dtype: of the weights that are not quantized.
        attention: the kernel.
        quantization: of the frozen weights, by bitsandbytes: NF4 double-quantized (QLoRA), or LLM.int8.
        trust_remote_code: run code that comes with the checkpoint.
    """

    name: str = MISSING
    revision: str | None = None
    dtype: Precision = "bfloat16"
    attention: Literal["sdpa", "flash", "eager"] = "sdpa"
    quantization: Literal["none", "8bit", "nf4"] = "none"
    trust_remote_code: bool = False


@dataclass(frozen=True)
class PatchOptions:
    """The rotary patch; arguments of :func:`rope_patch.apply`.

    Attributes:
        method: in the grammar, chains too, or ``fit``: a table fitted first; none keeps the checkpoint's own.
        target_length: context the model is made for; by default the longest row or position trained [tokens].
        layer_types: which tables, on mixed models.
        freeze_at: length at which a dynamic table is frozen [tokens].
        replace: replace an earlier patch.
        trainable: train the frequencies of the table, too, with what ``lora`` says.
        learning_rate: of the table's logarithms where it is trained; ``train.max_grad_norm`` counts their gradient too.
    """

    method: str | None = None
    target_length: str | int | None = None
    layer_types: list[str] | None = None
    freeze_at: int | None = None
    replace: bool = False
    trainable: bool = False
    learning_rate: float = 0.01


FIT = "fit"
"""What ``patch.method`` says for a table that is fitted first."""


@dataclass(frozen=True)
class FitOptions:
    """How the table of ``patch.method=fit`` is fitted, the weights frozen; arguments of :func:`rope_patch.fit`.

    Attributes:
        init: tables to start from, with spaces between; a factor that is left out is taken from the target length.
        steps: of gradient descent.
        learning_rate: on the logarithms of the frequencies.
        batch_tokens: of a step; two rows of the target by default, 4096 at least [tokens].
        retrieval: share of the learning rate for answers to prompts; 0 fits to text alone, and loses retrieval.
        task: what is to be found.
        band: no frequency leaves its start by more than this factor.
        monotone: no pair overtakes a faster one.
        curve: the factors follow so many cosines over the pairs.
        scaling: fit the factor on cos and sin, too.
        windows: of held-out text, which decides what is kept.
        samples: held-out haystacks per length.
    """

    init: str = "yarn"
    steps: int = 40
    learning_rate: float = 0.04
    batch_tokens: int | None = None
    retrieval: float = 0.8
    task: str = "passkey"
    band: float | None = None
    monotone: bool = False
    curve: int | None = None
    scaling: bool = False
    windows: int = 8
    samples: int = 4


@dataclass(frozen=True)
class LoraOptions:
    """What is trained.

    Attributes:
        rank: of the adapters; 0 trains every weight and no adapter.
        alpha: scale of the adapters times rank; twice the rank by default.
        dropout: before the adapters.
        target_modules: ``all-linear`` (attention and MLP), ``attention``, or names of projections.
        long_lora: train embeddings and norms too and save them with the adapter (LongLoRA, arXiv:2309.12307).
    """

    rank: int = 16
    alpha: int | None = None
    dropout: float = 0.0
    target_modules: str | list[str] = "all-linear"
    long_lora: bool = False


@dataclass(frozen=True)
class DataOptions:
    """What is read, and in which rows.

    Attributes:
        source: ``builtin`` (text that ships with CPython), a file, a folder, or a dataset's hub id.
        config: of a dataset.
        split: of a dataset.
        streaming: read a dataset as it comes, without a download.
        column: of the text; a column of message lists is rendered with the chat template.
        learn: of conversations: every token, or the assistant's.
        shuffle: documents, by the seed.
        lengths: of rows; a schedule gives shares of the steps: ``"4k:0.25 16k:0.25 32k"``. Each step sees as many
            tokens as one at the longest length.
        boundaries: ``join`` (documents see those before them in their row), ``apart`` or ``whole``.
        allow_short: train although no document is as long as a row.
        positions: ``full``, or short rows at positions up to ``patch.target_length``: ``pose`` or ``randpos``.
        chunks: of a row under ``pose``.
        retrieval: share of the rows that are retrieval prompts over training text.
        task: of these prompts.
        answer_weight: how much an answer's tokens count in these.
    """

    source: str = "builtin"
    config: str | None = None
    split: str = "train"
    streaming: bool = False
    column: str = "text"
    learn: Literal["all", "assistant"] = "all"
    shuffle: bool = True
    lengths: str | int = MISSING
    boundaries: Boundaries = "join"
    allow_short: bool = False
    positions: Literal["full", "pose", "randpos"] = "full"
    chunks: int = 2
    retrieval: float = 0.0
    task: str = "passkey"
    answer_weight: float = 5.0


@dataclass(frozen=True)
class TrainOptions:
    """How it is trained.

    Attributes:
        steps: of the optimizer.
        batch: rows of the longest length per pass and device.
        accumulate: passes per step.
        learning_rate: its highest value.
        scheduler: as transformers names them.
        warmup: steps, or a share of them below 1.
        optimizer: AdamW; ``adamw_8bit`` and ``paged_adamw_8bit`` are bitsandbytes'.
        weight_decay: of AdamW.
        max_grad_norm: gradients are clipped to.
        precision: of the arithmetic (autocast); ``float32`` turns autocast off.
        checkpointing: compute each layer again in the backward pass: less memory, a third more time.
        liger: Liger's kernels for norms and MLPs; needs a GPU and the extra ``gpu``. The loss is ours either way.
        seed: of adapters, order, positions and prompts.
        save_every: steps between checkpoints; by default those of ``evaluation.every``, or a fifth of all.
        keep: checkpoints kept, the best one among them.
        log_every: steps between lines of the log.
    """

    steps: int = 500
    batch: int = 1
    accumulate: int = 8
    learning_rate: float = 2e-4
    scheduler: str = "constant_with_warmup"
    warmup: float = 20
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "sgd"] = "adamw"
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    precision: Precision = "bfloat16"
    checkpointing: bool = True
    liger: bool = False
    seed: int = 0
    save_every: int | None = None
    keep: int = 2
    log_every: int = 5


@dataclass(frozen=True)
class EvaluationOptions:
    """How the run is judged: perplexity by position and retrieval, during training and at the end.

    Attributes:
        every: steps between evaluations; the best of them by retrieval, then perplexity, is kept. 0: only at the end.
        before: evaluate the patched model before training too.
        lengths: of the prompts; perplexity is by the positions between them. By default the target length.
        depths: of the needles.
        samples: haystacks per length; each is asked at every depth.
        windows: windows of text, as long as the longest length; 0 leaves perplexity out.
        text: file or folder for perplexity; by default held-out text that ships with CPython.
        haystack: ``builtin``, ``noise``, a file or folder.
        task: retrieval task.
        mode: ``single`` (a needle per prompt) or ``multikey``, which reads less text for as many questions.
        chunk: tokens per forward pass; bounds memory.
        patience: stop after so many evaluations without a better one; 0 never.
        seed: of keys and haystacks; no prompt of training is among them.
    """

    every: int = 0
    before: bool = True
    lengths: str | None = None
    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    samples: int = 4
    windows: int = 8
    text: str | None = None
    haystack: str = "builtin"
    task: str = "passkey"
    mode: Literal["single", "multikey"] = "single"
    chunk: int | None = None
    patience: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Options:
    """A whole run.

    Attributes:
        model: the checkpoint.
        patch: its rotary patch.
        lora: what is trained.
        data: what is read.
        train: how.
        evaluation: how it is judged.
        fit: how the table of ``patch.method=fit`` is fitted.
        output: folder of the adapter; checkpoints, logs and rows are under ``work`` in it.

    Raises:
        ValueError: a value out of range, or two that exclude each other.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    patch: PatchOptions = field(default_factory=PatchOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)
    data: DataOptions = field(default_factory=DataOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    fit: FitOptions = field(default_factory=FitOptions)
    output: str = MISSING

    def __post_init__(self) -> None:
        for name, found in _flat(self.to_dict()):
            if isinstance(found, float) and not math.isfinite(found):
                raise ValueError(f"{name} must be finite, got {found}")
            if found == "":
                raise ValueError(f"{name} is empty: leave it out, or give a value")
        if self.patch.method not in (None, FIT):
            as_method(self.patch.method)
        stages, target = self.stages, self.target_length
        low: tuple[tuple[str, float | None, float], ...] = (
            ("patch.freeze_at", self.patch.freeze_at, 1),
            ("fit.steps", self.fit.steps, 0),
            ("fit.batch_tokens", self.fit.batch_tokens, target * (2 if self.fit.retrieval else 1)),
            ("fit.windows", self.fit.windows, 1),
            ("fit.samples", self.fit.samples, 1),
            ("lora.rank", self.lora.rank, 0),
            ("lora.alpha", self.lora.alpha, 1),
            ("data.chunks", self.data.chunks, 1),
            ("data.answer_weight", self.data.answer_weight, 0),
            ("train.steps", self.train.steps, 1),
            ("train.batch", self.train.batch, 1),
            ("train.accumulate", self.train.accumulate, 1),
            ("train.warmup", self.train.warmup, 0),
            ("train.weight_decay", self.train.weight_decay, 0),
            ("train.max_grad_norm", self.train.max_grad_norm, 0),
            ("train.save_every", self.train.save_every, 1),
            ("train.keep", self.train.keep, 1),
            ("train.log_every", self.train.log_every, 1),
            ("evaluation.every", self.evaluation.every, 0),
            ("evaluation.windows", self.evaluation.windows, 0),
            ("evaluation.patience", self.evaluation.patience, 0),
            ("train.seed", self.train.seed, 0),
        )
        for name, value, least in low:
            if value is not None and value < least:
                raise ValueError(f"{name} must be >= {least:g}, got {value:g}")
        for name, value in (("data.retrieval", self.data.retrieval), ("lora.dropout", self.lora.dropout)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {value}")
        for section in ("train", "patch", "fit"):
            rate = getattr(self, section).learning_rate
            if not rate > 0:
                raise ValueError(f"{section}.learning_rate must be > 0, got {rate}")
        self._check_table()
        longest, shortest = max(length for length, _ in stages), min(length for length, _ in stages)
        if longest > target:
            raise ValueError(
                f"rows of {longest} tokens are longer than patch.target_length={target}: the patch is not made for them"
            )
        if self.data.positions != "full" and self.patch.target_length is None:
            raise ValueError(
                f"data.positions={self.data.positions} needs patch.target_length, which positions go up to"
            )
        if self.data.positions == "pose" and self.data.chunks > shortest:
            raise ValueError(f"data.chunks={self.data.chunks} are more than a row has tokens, {shortest}")
        if self.data.positions != "full" and self.data.boundaries == "apart":
            raise ValueError(f"data.positions={self.data.positions} needs boundaries join or whole, not apart")
        if self.lora.rank == 0 and (self.model.quantization != "none" or self.lora.long_lora):
            raise ValueError("lora.rank=0 trains every weight: not with quantized weights, and long_lora adds nothing")
        if (self.lora.rank == 0 or self.lora.long_lora) and self.model.dtype != "float32":
            asked = "lora.long_lora" if self.lora.rank else "lora.rank=0"
            raise ValueError(
                f"{asked} trains the model's own weights, whose small updates {self.model.dtype} rounds away: set "
                "model.dtype=float32 (train.precision still sets the arithmetic)"
            )
        if self.evaluation.every and self.save_every != self.evaluation.every:
            raise ValueError(
                f"train.save_every={self.save_every} must be evaluation.every={self.evaluation.every}, or left out: "
                "the best of what was judged must be there to be kept"
            )
        if self.evaluation.patience and not self.evaluation.every:
            raise ValueError("evaluation.patience needs evaluation.every: nothing is judged before the end")
        self._check_questions()

    def _check_table(self) -> None:
        """Raise ValueError for a table that can be neither fitted nor trained so."""
        if self.patch.method == FIT:
            from rope_patch.fitting import Constraint, Objective

            try:
                Objective(self.fit.retrieval, self.fit.task)
                Constraint(self.fit.band, self.fit.monotone, self.fit.curve, self.fit.scaling)
                starts = [as_method(start) for start in self.fit.init.split()]
                if not starts or len({str(start) for start in starts}) < len(starts):
                    raise ValueError(f"init must name tables that differ, got {self.fit.init!r}")
            except ValueError as error:
                raise ValueError(f"fit: {error}") from None
        elif self.fit != FitOptions():
            raise ValueError("fit.* without patch.method=fit would change nothing")
        if not self.patch.trainable and self.patch.learning_rate != PatchOptions.learning_rate:
            raise ValueError("patch.learning_rate without patch.trainable=true would change nothing")
        if self.patch.trainable and self.train.optimizer not in ("adamw", "sgd"):
            raise ValueError(f"patch.trainable: {self.train.optimizer} cannot train a table: take adamw or sgd")

    def _check_questions(self) -> None:
        asked = self.evaluation
        try:
            check_retrieval(asked.task, asked.mode, self.evaluation_lengths, asked.depths, asked.samples, asked.chunk)
            if not all(0 <= depth <= 1 for depth in asked.depths):
                raise ValueError(f"depths must be in [0, 1], got {asked.depths}")
        except ValueError as error:
            raise ValueError(f"evaluation: {error}") from None
        if self.data.retrieval:
            try:
                find_task(self.data.task)
            except ValueError as error:
                raise ValueError(f"data.task: {error}") from None

    @property
    def stages(self) -> tuple[tuple[int, float], ...]:
        """Length of the rows [tokens] and share of the steps, stage by stage.

        Raises:
            ValueError: shares that do not make up the whole, or lengths that do not divide the longest.
        """
        made, left = [], 1.0
        words = str(self.data.lengths).replace(",", " ").split()
        for i, word in enumerate(words):
            size, _, share = word.partition(":")
            try:
                part = float(share) if share else left
            except ValueError:
                raise ValueError(f"data.lengths: a stage is LENGTH or LENGTH:SHARE, got {word!r}") from None
            if i + 1 < len(words) and not share:
                raise ValueError(f"data.lengths: all stages but the last need a share of the steps, {word!r} has none")
            if not (part > 1e-9 and left - part > -1e-9):
                raise ValueError(f"data.lengths: the shares must be > 0 and leave some for the last, got {words}")
            if i + 1 == len(words) and abs(left - part) > 1e-9:
                raise ValueError(f"data.lengths: the shares must make up the whole, got {words}: leave out the last")
            made.append((_length("data.lengths", size), part))
            left -= part
        if not made:
            raise ValueError("data.lengths is empty: give the length of a row, such as 32k")
        longest = max(length for length, _ in made)
        for length, _ in made:
            if length < 2:
                raise ValueError(f"data.lengths: a row needs at least 2 tokens to learn one, got {length}")
            if longest % length:
                raise ValueError(f"data.lengths: {length} does not divide the longest row, {longest}")
        return tuple(made)

    @property
    def target_length(self) -> int:
        """Context that the patch is made for [tokens]."""
        if self.patch.target_length is None:
            return max(length for length, _ in self.stages)
        return _length("patch.target_length", str(self.patch.target_length))

    @property
    def save_every(self) -> int:
        """Steps between checkpoints."""
        return self.train.save_every or self.evaluation.every or max(1, self.train.steps // 5)

    @property
    def evaluation_lengths(self) -> tuple[int, ...]:
        """Prompt lengths of the evaluation [tokens]."""
        lengths = self.evaluation.lengths
        words = [str(self.target_length)] if lengths is None else lengths.replace(",", " ").split()
        return tuple(sorted(_length("lengths", word) for word in words))

    def to_dict(self) -> dict[str, Any]:
        """Return all values, nested as they are."""
        return dataclasses.asdict(self)

    def to_yaml(self) -> str:
        """Return a file that :func:`read` reads back."""
        return OmegaConf.to_yaml(OmegaConf.create(self.to_dict()))


SECTIONS: dict[str, Any] = {f.name: f.default_factory for f in dataclasses.fields(Options) if f.name != "output"}

TEXTS = {
    "output",
    *(
        f"{name}.{key}"
        for name, kind in SECTIONS.items()
        for key, hint in get_type_hints(kind).items()
        if hint in (str, str | None)
    ),
}
"""Options that are text, whatever it looks like: a revision may be all digits."""


def read(files: Sequence[str | Path] = (), words: Sequence[str] = (), base: dict[str, Any] | None = None) -> Options:
    """Return the options of YAML files, each over those before it, then of ``key=value`` words.

    Args:
        files: YAML; relative paths of model, data and output are the caller's, not the file's.
        words: such as ``train.steps=100``.
        base: nested values in place of the defaults.

    Raises:
        FileNotFoundError: no such file.
        ValueError: an unknown key (the nearest known one is named), a value of the wrong type or out of range, or a
            missing one.

    Example:
        >>> options = read(words=["model.name=llama", "data.lengths=1k", "output=out", "patch.method=yarn:factor=4"])
        >>> options.target_length, options.train.steps
        (1024, 500)
        >>> read(words=["train.stepps=3"])
        Traceback (most recent call last):
        ...
        ValueError: unknown option 'train.stepps'. Did you mean 'train.steps'? Known in train: steps, batch, ...
    """
    made: Any = OmegaConf.structured(Options)
    for layer, where in _layers(files, words, base):
        try:
            made = OmegaConf.merge(made, OmegaConf.create(_plain(layer, where)))
        except ConfigKeyError as error:
            raise ValueError(f"{where}{_unknown(str(error.full_key))}") from None
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            if "is not a ListConfig" in reason:
                reason = "it must be a list, such as [0.1, 0.5] or [full_attention]"
            raise ValueError(f"{where}{error.full_key}: {reason}") from None
    for name in sorted(OmegaConf.missing_keys(made)):
        raise ValueError(f"{name} is missing: give it in a YAML file or as {name}=VALUE")
    return OmegaConf.to_object(made)  # type: ignore[return-value]


def _layers(files: Sequence[str | Path], words: Sequence[str], base: Any) -> Iterator[tuple[dict[Any, Any], str]]:
    """Nested values, the later over the earlier, with what an error begins with."""
    if base:
        yield base, ""
    for file in files:
        if not Path(file).is_file():
            raise FileNotFoundError(f"no config file {str(file)!r}")
        try:
            loaded = OmegaConf.load(file)
        except Exception as error:  # of the YAML parser; its words say line and column
            raise ValueError(f"{file} is no YAML: {' '.join(str(error).split())}") from None
        if not OmegaConf.is_dict(loaded):
            raise ValueError(f"{file} holds no options: expected sections such as 'model:'")
        yield OmegaConf.to_container(loaded, resolve=False), f"{file}: "  # type: ignore[misc]
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise ValueError(f"expected key=value or a .yaml file, got {word!r}")
        section, _, last = name.rpartition(".")
        if name in TEXTS and text not in ("null", ""):
            yield ({section: {last: text}} if section else {last: text}), ""
            continue
        try:
            made = OmegaConf.from_dotlist([word])
        except Exception as error:
            raise ValueError(f"{name}: no YAML value: {' '.join(str(error).split())}") from None
        yield OmegaConf.to_container(made, resolve=False), ""  # type: ignore[misc]


def _plain(layer: dict[Any, Any], where: str) -> dict[Any, Any]:
    """Return a layer without its empty sections, where every value stands for itself.

    OmegaConf would fill in ``${...}``, environment variables too, and take ``???`` for nothing.
    """
    made = {name: value for name, value in layer.items() if value is not None or name not in SECTIONS}
    for name, value in made.items():
        if name in SECTIONS and not isinstance(value, dict):
            raise ValueError(f"{where}{name} is a section of options, not a value: got {value!r}")
    for name, value in _flat(made):
        if isinstance(value, str) and ("${" in value or value == "???"):
            raise ValueError(f"{where}{name}: {value!r} would stand for another value: write that one out")
        if name in TEXTS and isinstance(value, bool | float):
            raise ValueError(f"{where}{name}: text is wanted, and YAML reads {value!r} here: put it in quotes")
    return made


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that is no dictionary and no list, with its dotted name."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from _flat(inner, name)
    else:
        yield name, value


def _length(name: str, text: str) -> int:
    try:
        return parse_length(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _unknown(key: str) -> str:
    section, _, _ = key.rpartition(".")
    known = [f.name for f in dataclasses.fields(SECTIONS.get(section, Options))]
    everywhere = [f"{name}.{f.name}" for name, kind in SECTIONS.items() for f in dataclasses.fields(kind)]
    common = [name for name in everywhere if not name.startswith(f"{FIT}.")]  # steps are train.steps to most
    near = (
        did_you_mean(key, [*common, "output"])
        or did_you_mean(key, everywhere)
        or did_you_mean(key.rpartition(".")[2], [name.rpartition(".")[2] for name in everywhere])
    )
    return f"unknown option {key!r}.{near} Known in {section or 'the file'}: {', '.join(known)}"
