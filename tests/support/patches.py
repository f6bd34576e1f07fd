"""Helpers of tests of patches: a method for a family, the rotary module in use, adapters on a patched model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

import rope_patch
from rope_patch import METHODS
from rope_patch.methods import Scaling, create
from rope_patch.patching.locate import locate
from support.tiny import ARCHITECTURES, tiny_model

FITTING = [(f, n) for f in ARCHITECTURES for n in METHODS if (f, n) != ("gemma4", "partial")]
"""Families and the names of the methods that take them: the table of Gemma 4 is p-RoPE, which partial refuses."""


def method_for(name: str):
    """A method with its defaults and a factor of 4, if it has one."""
    return create(name, **({"factor": 4} if issubclass(METHODS[name], Scaling) else {}))


def module_of(model):
    return locate(model).module


def cos_sin(model, positions, layer_type=None):
    x = torch.zeros(1)
    module = module_of(model)
    return module(x, positions) if layer_type is None else module(x, positions, layer_type=layer_type)


def read_json(path):
    return json.loads(path.read_text())


def config_of(folder):
    return read_json(folder / "config.json")


def edit_json(path, change):
    data = read_json(path)
    change(data)
    path.write_text(json.dumps(data))


def saved_with(model: PreTrainedModel, folder: Path, **config: Any) -> Path:
    """Save a model, and change its config.json: a value of None takes a key out."""
    model.save_pretrained(folder)

    def change(data: dict[str, Any]) -> None:
        data.update(config)
        for key in [key for key, value in config.items() if value is None]:
            del data[key]

    edit_json(folder / "config.json", change)
    return folder


def patched_model(method, family="llama", **options):
    """A tiny random model that is patched with a method; options are those of ``apply``."""
    model = tiny_model(family)
    rope_patch.apply(model, method, **options)
    return model


def training_begun(model, **trainer):
    """Let RopePatchCallback see the beginning of a training; ``trainer`` holds what a Trainer gives besides."""
    rope_patch.RopePatchCallback().on_train_begin(None, SimpleNamespace(global_step=0), None, model=model, **trainer)


def lora(model, seed=1):
    torch.manual_seed(seed)
    # PEFT's own initial weights make an adapter that changes nothing.
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, config).eval()
