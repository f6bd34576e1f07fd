"""LoRA on the chosen method: which rows, how many, and the run of the recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rope_patch.modeling.identity import model_hash
from rope_patch.options.extend import ExtendSettings
from rope_patch.options.finetune import RecipeOptions
from rope_patch.options.yaml_and_json import options_from_dict
from rope_patch.patching.install import patched
from rope_patch.planning import plan
from rope_patch.runtime.folders import folder_in_one_move
from rope_patch.runtime.parallel import from_first_process, processes
from rope_patch.runtime.result_cache import key

DEFAULT_ROWS = 200
"""Number of rows of a training where no time is given; fewer teach little."""

LONGEST_ROW = 2048
"""Length of a row at skipped positions at most [tokens]."""

ROWS_PER_STEP = 8
"""Number of rows in each step of the optimizer."""

MODEL_COPY = "model"
"""Name of the folder beside the adapter that holds the model which is trained."""

TRAINING_SHARE = 0.5
"""Share of a budget that is for the training."""

STEP_COST = 4.0
"""How many times as long as reading a token a step of training takes for it: forward, backward, and checkpointing."""


@dataclass(frozen=True)
class Training:
    """The rows that a training reads, and its number of steps.

    Attributes:
        positions: the kind of rows: ``"full"``, rows of the target length, or ``"pose"``, short rows whose positions
            skip ahead.
        row: the length of a row [tokens].
        steps: the number of steps of the optimizer, of :data:`ROWS_PER_STEP` rows each.
    """

    positions: str
    row: int
    steps: int

    @property
    def tokens(self) -> int:
        """Number of tokens that the training reads in all."""
        return self.steps * ROWS_PER_STEP * self.row

    def __str__(self) -> str:
        text = f"{self.steps * ROWS_PER_STEP} rows of {self.row} tokens"
        if self.positions != "full":
            text += ", at positions that skip ahead (PoSE)"
        return text


def plan_training(model: PreTrainedModel, options: ExtendSettings, trained_length: int, speed: float) -> Training:
    """Return the rows to train on: those that fit into memory and time.

    Args:
        model: the model in memory.
        options: the options of the run.
        trained_length: the context that the model was trained with [tokens].
        speed: how many tokens the model reads in a second.
    """
    tokens = None
    if options.budget is not None:
        tokens = TRAINING_SHARE * options.budget * speed

    def rows(length: int) -> int:
        if options.train_rows:
            return options.train_rows
        if tokens is None:
            return DEFAULT_ROWS
        return max(ROWS_PER_STEP, int(tokens / (STEP_COST * length)))

    # Skipped positions stand in for whole rows where these do not fit, or are too few: more short ones teach more.
    positions = "full"
    row = options.length
    if row > LONGEST_ROW:
        few = tokens is not None and rows(row) < DEFAULT_ROWS
        if few or not _fits(model, row):
            positions = "pose"
            row = min(trained_length, LONGEST_ROW)
    return Training(positions, row, math.ceil(rows(row) / ROWS_PER_STEP))


def _fits(model: PreTrainedModel, length: int) -> bool:
    """Tell whether a row of a length fits into the memory of this process's GPU; on a CPU whole rows take too long."""
    if model.device.type != "cuda":
        return False
    memory = torch.cuda.get_device_properties(model.device).total_memory / 2**30
    try:
        return plan(model, length=length, lora_rank=16, checkpointing=True).fits(memory)
    except ValueError:  # a family that a plan does not cover: short rows fit in any case
        return False


def train_adapter(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    method: str,
    options: ExtendSettings,
    training: Training,
    work: Path,
    *,
    owned: bool = False,
) -> Path:
    """Train an adapter with the recipe, or go on where it was interrupted; return its folder.

    Args:
        model: the model in memory. It is saved and trained from there, since it may be merged from an adapter, or
            changed.
        tokenizer: the tokenizer of the model, which is saved beside it.
        method: the method under which the adapter is trained, as a method string.
        options: the options of the run.
        training: the rows that are trained on, and the number of steps.
        work: the folder in which the adapter's folder is made.
        owned: whether nobody needs the model any more when it is saved, so that its weights are freed: the recipe
            loads a model of its own.
    """
    from rope_patch.training.finetune import finetune

    source = work / MODEL_COPY
    dtype = str(model.dtype).removeprefix("torch.")

    def save() -> None:
        with folder_in_one_move(source) as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)

    # One process writes; the others wait until the folder is there.
    from_first_process(save)
    recipe: dict[str, Any] = {
        "model": {"name": str(source), "dtype": dtype},
        "patch": {"method": method, "target_length": options.length},
        "data": {"positions": training.positions},
        "train": {
            "max_length": training.row,
            "max_steps": training.steps,
            "gradient_accumulation_steps": max(1, ROWS_PER_STEP // processes()[1]),  # each process reads as many
            "learning_rate": 4e-4,
            "lr_scheduler_type": "cosine",
            "warmup_steps": round(0.1 * training.steps),
            "bf16": dtype == "bfloat16",
            "fp16": dtype == "float16",
            "gradient_checkpointing": torch.accelerator.is_available(),
            "seed": options.evaluation.seed,
            "save_steps": max(1, training.steps // 10),
        },
        # The caller evaluates, by the same protocol as before the training.
        "evaluation": {
            "before": False,
            "every": 0,
            "lengths": str(training.row),
            "depths": [0.5],
            "samples": 1,
            "windows": 0,
        },
    }
    if options.train_text is not None:
        recipe["data"]["source"] = options.train_text
    # Another training has another folder: a run goes on with an interrupted training only if it is the same.
    with patched(model, method, target_length=options.length):
        identity = key(recipe=recipe, model=model_hash(model), vocabulary=tokenizer.get_vocab())
    folder = work / f"adapter-{identity[:8]}"
    if owned:
        free_weights(model)
    finetune(options_from_dict(RecipeOptions, recipe | {"output": folder}), command="rope-patch extend")
    return folder


def free_weights(model: nn.Module) -> None:
    """Free the weights of a model for good, whoever still holds the model itself."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.new_empty(0)
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
