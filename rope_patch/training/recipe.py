"""All options of a recipe's run, checked: what is out of range, and which options exclude each other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING, OmegaConf

from rope_patch.evaluation.spec import check_retrieval
from rope_patch.evaluation.tasks import find_task
from rope_patch.methods import as_method
from rope_patch.methods.two_tables import check_one_table
from rope_patch.runtime.text import parse_length
from rope_patch.training.options import (
    DataOptions,
    EvaluationOptions,
    LoraOptions,
    ModelOptions,
    PatchOptions,
    TrainOptions,
)


@dataclass(frozen=True)
class RecipeOptions:
    """All options of a run.

    Attributes:
        model: the checkpoint.
        patch: its rotary patch.
        lora: which weights are trained.
        data: the documents and rows.
        train: the optimizer and its steps.
        evaluation: how the model is evaluated.
        output: folder of the adapter; its subfolder ``work`` has checkpoints, logs and rows.

    Raises:
        ValueError: a value out of range, or two that exclude each other.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    patch: PatchOptions = field(default_factory=PatchOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)
    data: DataOptions = field(default_factory=DataOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    output: str = MISSING

    def __post_init__(self) -> None:
        for name, value in flatten(self.to_dict()):
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} must be finite, got {value}")
            if value == "":
                raise ValueError(f"{name} is empty: leave it out, or give a value")
        if self.patch.method is not None:
            check_one_table(as_method(self.patch.method), "a model in training")
        self._check_ranges()
        self._check_rows()
        self._check_weights()
        self._check_evaluation()

    def _check_ranges(self) -> None:
        minima: dict[str, float] = {
            "patch.freeze_at": 1,
            "lora.rank": 0,
            "lora.alpha": 1,
            "data.chunks": 1,
            "data.answer_weight": 0,
            "train.steps": 1,
            "train.batch": 1,
            "train.accumulate": 1,
            "train.warmup": 0,
            "train.weight_decay": 0,
            "train.max_grad_norm": 0,
            "train.save_every": 1,
            "train.keep": 1,
            "train.log_every": 1,
            "evaluation.every": 0,
            "evaluation.windows": 0,
            "evaluation.patience": 0,
            "train.seed": 0,
        }
        values = dict(flatten(self.to_dict()))
        for name, minimum in minima.items():
            value = values[name]
            if value is not None and value < minimum:
                raise ValueError(f"{name} must be >= {minimum:g}, got {value:g}")
        for name in ("data.retrieval", "lora.dropout"):
            if not 0 <= values[name] <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {values[name]}")
        if not self.train.learning_rate > 0:
            raise ValueError(f"train.learning_rate must be > 0, got {self.train.learning_rate}")

    def _check_rows(self) -> None:
        data, target = self.data, self.target_length
        lengths = [length for length, _ in self.stages]
        if max(lengths) > target:
            raise ValueError(
                f"rows of {max(lengths)} tokens are longer than patch.target_length={target}, the context that the "
                "model is patched for: give shorter data.lengths or a longer patch.target_length"
            )
        if data.positions == "full":
            return
        if self.patch.target_length is None:
            raise ValueError("data.positions=pose needs patch.target_length: positions are drawn from below it")
        if data.chunks > min(lengths):
            raise ValueError(f"data.chunks={data.chunks} is more than the tokens of a row, {min(lengths)}")
        if data.boundaries == "apart":
            raise ValueError("data.positions=pose needs data.boundaries=join or whole, not apart")

    def _check_weights(self) -> None:
        every_weight = self.lora.rank == 0
        if every_weight and (self.model.quantization != "none" or self.lora.long_lora):
            raise ValueError(
                "lora.rank=0 trains every weight: that excludes model.quantization, and lora.long_lora adds nothing"
            )
        if (every_weight or self.lora.long_lora) and self.model.dtype != "float32":
            option = "lora.rank=0" if every_weight else "lora.long_lora"
            raise ValueError(
                f"{option} trains the model's own weights, and {self.model.dtype} would round their small updates "
                "away: set model.dtype=float32 (train.precision still sets the arithmetic)"
            )

    def _check_evaluation(self) -> None:
        options = self.evaluation
        if options.every and self.save_every != options.every:
            raise ValueError(
                f"train.save_every={self.save_every} must equal evaluation.every={options.every}, or be left out: the "
                "checkpoint with the best evaluation can only be kept if it is saved"
            )
        if options.patience and not options.every:
            raise ValueError("evaluation.patience needs evaluation.every: without it only the end is evaluated")
        try:
            check_retrieval(
                options.task, options.mode, self.evaluation_lengths, options.depths, options.samples, options.chunk
            )
            if not all(0 <= depth <= 1 for depth in options.depths):
                raise ValueError(f"depths must be in [0, 1], got {options.depths}")
        except ValueError as error:
            raise ValueError(f"evaluation: {error}") from None
        if self.data.retrieval:
            try:
                find_task(self.data.task)
            except ValueError as error:
                raise ValueError(f"data.task: {error}") from None

    def warnings(self) -> list[str]:
        """Return what is allowed and probably not meant, a sentence each."""
        sentences = []
        if self.warmup_steps > self.train.steps:
            sentences.append(
                f"train.warmup={self.train.warmup:g} steps are more than train.steps={self.train.steps}: the learning "
                f"rate never reaches {self.train.learning_rate:g}; give fewer, or a share below 1 such as 0.1"
            )
        return sentences

    @property
    def stages(self) -> tuple[tuple[int, float], ...]:
        """Length of the rows [tokens] and share of the steps, stage by stage.

        Raises:
            ValueError: shares that do not add up to 1, or lengths that do not divide the longest.
        """
        stages, remaining = [], 1.0
        items = str(self.data.lengths).replace(",", " ").split()
        for i, item in enumerate(items):
            size, _, text = item.partition(":")
            try:
                share = float(text) if text else remaining
            except ValueError:
                raise ValueError(f"data.lengths: a stage is LENGTH or LENGTH:SHARE, got {item!r}") from None
            if i + 1 < len(items) and not text:
                raise ValueError(f"data.lengths: all stages but the last need a share of the steps, {item!r} has none")
            if not (share > 1e-9 and remaining - share > -1e-9):
                raise ValueError(f"data.lengths: each share must be > 0, and together at most 1, got {items}")
            if i + 1 == len(items) and abs(remaining - share) > 1e-9:
                raise ValueError(f"data.lengths: the shares must add up to 1, got {items}: leave out the last one")
            stages.append((_length("data.lengths", size), share))
            remaining -= share
        if not stages:
            raise ValueError("data.lengths is empty: give the length of a row, such as 32k")
        longest = max(length for length, _ in stages)
        for length, _ in stages:
            if length < 2:
                raise ValueError(f"data.lengths: a row must have at least 2 tokens, got {length}")
            if longest % length:
                raise ValueError(f"data.lengths: {length} does not divide the longest row, {longest}")
        return tuple(stages)

    @property
    def target_length(self) -> int:
        """Context that the model is patched for [tokens]."""
        if self.patch.target_length is None:
            return max(length for length, _ in self.stages)
        return _length("patch.target_length", str(self.patch.target_length))

    @property
    def warmup_steps(self) -> int:
        """Steps over which the learning rate rises."""
        warmup = self.train.warmup
        return round(warmup * self.train.steps) if warmup < 1 else int(warmup)

    @property
    def save_every(self) -> int:
        """Steps between checkpoints."""
        return self.train.save_every or self.evaluation.every or max(1, self.train.steps // 5)

    @property
    def evaluation_lengths(self) -> tuple[int, ...]:
        """Prompt lengths of the evaluation [tokens]."""
        lengths = self.evaluation.lengths
        items = [str(self.target_length)] if lengths is None else lengths.replace(",", " ").split()
        return tuple(sorted(_length("lengths", item) for item in items))

    def to_dict(self) -> dict[str, Any]:
        """Return all values, nested by section."""
        return dataclasses.asdict(self)

    def to_yaml(self) -> str:
        """Return a file that :func:`~rope_patch.training.reading.read` reads back."""
        return OmegaConf.to_yaml(OmegaConf.create(self.to_dict()))


def flatten(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that is no dictionary and no list, with its dotted name.

    >>> list(flatten({"lora": {"rank": 4, "names": ["q", "v"]}}))
    [('lora.rank', 4), ('lora.names', 'q'), ('lora.names', 'v')]
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flatten(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from flatten(inner, name)
    else:
        yield name, value


def _length(name: str, text: str) -> int:
    try:
        return parse_length(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
