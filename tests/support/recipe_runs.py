"""Options of a short fine-tuning run of a bundled checkpoint, and its losses."""

from __future__ import annotations

import functools
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest

import rope_patch
from rope_patch.cli.parsing import parse_words
from rope_patch.options.finetune import FinetuneOptions, RecipeOptions
from rope_patch.training.checks import build

needs_trl = pytest.mark.skipif(find_spec("trl") is None, reason="TRL, of the extra train, is not installed")


SMALL = [
    "model.name=llama",
    "model.dtype=float32",
    "patch.method=yarn:factor=4",
    "patch.target_length=1024",
    "train.max_length=128",
    "train.max_steps=4",
    "train.gradient_accumulation_steps=2",
    "train.warmup_steps=1",
    "train.bf16=false",
    "train.learning_rate=0.01",
    "train.logging_steps=1",
    "evaluation.lengths=128 256",
    "evaluation.depths=0.2,0.8",
    "evaluation.samples=1",
    "evaluation.windows=2",
]


def recipe(*words: str | Path) -> RecipeOptions:
    """Return the options from YAML files and overrides (``train.max_steps=3``); later ones replace earlier ones."""
    return parse_words(FinetuneOptions, [str(word) for word in words]).recipe


@functools.cache
def script():
    """The functions of ``recipes/finetune_lora.py``; its import takes seconds."""
    return runpy.run_path(str(rope_patch.data_path("recipes") / "finetune_lora.py"))


def arguments(options):
    """The ``SFTConfig`` of a run on one GPU."""
    given = script()["training_arguments"](options) | {"output_dir": "x", "report_to": "none", "use_cpu": True}
    return build(script()["SFTConfig"], "train", given)


def losses(result):
    return [entry["loss"] for entry in result.results["losses"]]
