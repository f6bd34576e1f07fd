"""Options of a short fine-tuning run of a bundled checkpoint, and its losses."""

from __future__ import annotations

from pathlib import Path

import rope_patch
from rope_patch.cli.parsing import parse_words
from rope_patch.options.finetune import FinetuneOptions, RecipeOptions

LLAMA = rope_patch.data_path("assets") / "llama"

SMALL = [
    "model.name=llama",
    "model.dtype=float32",
    "patch.method=yarn:factor=4",
    "patch.target_length=1024",
    "data.length=128",
    "train.steps=4",
    "train.batch=1",
    "train.accumulate=2",
    "train.warmup=1",
    "train.precision=float32",
    "train.learning_rate=0.01",
    "train.log_every=1",
    "evaluation.lengths=128 256",
    "evaluation.depths=0.2,0.8",
    "evaluation.samples=1",
    "evaluation.windows=2",
]


def recipe(*words: str | Path) -> RecipeOptions:
    """Return the options from YAML files and overrides such as ``train.steps=3``; later ones replace earlier ones."""
    return parse_words(FinetuneOptions, [str(word) for word in words]).recipe


def losses(result):
    return [entry["loss"] for entry in result.results["losses"]]
