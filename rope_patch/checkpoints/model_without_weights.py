"""Build the model of a checkpoint without its weights, to read its rotary table from the config alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rope_patch.checkpoints.adapters import ADAPTER_FILE, adapter_base, naming_base
from rope_patch.checkpoints.load_gguf import put_table
from rope_patch.checkpoints.source_files import (
    auto_class,
    check_older_keys,
    config_json,
    load_config,
    naming_checkpoint,
)
from rope_patch.gguf.table import read_gguf
from rope_patch.runtime.folders import is_gguf


def model_without_weights(
    source: str | Path, *, beside_adapter: bool = False, checked: bool = True, **options: Any
) -> PreTrainedModel:
    """Return a checkpoint's model without weights, on the meta device.

    Its tables are those that the config describes, or those that a GGUF file holds.

    Args:
        source: folder, hub id or GGUF file.
        beside_adapter: whether the folder may hold an adapter beside the model; the adapter is not loaded.
        checked: whether to refuse a patched checkpoint whose config tells transformers 4 and 5 different tables.
        **options: arguments of ``AutoConfig.from_pretrained``, among them values that replace those of the config.

    Raises:
        OSError: nothing can be loaded, or there is no such repository; the message says what to do.
        ValueError: there is no such folder, no checkpoint in it, or it is not a causal language model.
        PatchError: the config of a patched checkpoint tells transformers 4 and 5 different tables, and ``checked`` is
            set.
    """
    if (Path(source) / ADAPTER_FILE).is_file() and not beside_adapter:
        raise ValueError(
            f"{source} holds an adapter: give its base model, from a folder of its own, or load both with "
            "rope_patch.load"
        )
    config = load_config(source, **options)
    if checked:
        check_older_keys(config_json(source, **options), source)
    with torch.device("meta"), naming_checkpoint(source):
        model: PreTrainedModel = auto_class(config.model_type).from_config(
            config, trust_remote_code=options.get("trust_remote_code")
        )
    if is_gguf(source):
        model.config.architectures = [type(model).__name__]
        model.config.dtype = "float32"
        put_table(model, read_gguf(source), Path(source))
    return model


def base_without_weights(adapter: str | Path, **options: Any) -> PreTrainedModel:
    """Return the base model of an adapter without weights, as :func:`model_without_weights` does."""
    with naming_base(adapter):
        return model_without_weights(adapter_base(adapter), beside_adapter=True, **options)
