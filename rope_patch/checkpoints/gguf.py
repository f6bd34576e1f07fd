"""Load a GGUF file with the rotary table that it holds: transformers' own reader takes its base alone."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from rope_patch.checkpoints.gguf_file import open_gguf
from rope_patch.checkpoints.gguf_reader import read_once
from rope_patch.checkpoints.gguf_table import ROUNDED_TWICE, read_gguf, sliding_base
from rope_patch.checkpoints.source_files import in_gguf, read_tokenizer
from rope_patch.errors import blamed_on
from rope_patch.methods import Table
from rope_patch.patching.install import apply, reapply, rebase
from rope_patch.patching.locate import PatchError, locate
from rope_patch.patching.record import PatchRecord, TableRecord, settings_of
from rope_patch.patching.verify import Inspection, inspect_model
from rope_patch.runtime import progress
from rope_patch.runtime.folders import is_gguf
from rope_patch.tables import RotaryTable


def load_gguf(path: str | Path, **from_pretrained: Any) -> PreTrainedModel:
    """Load a GGUF file as a model of transformers that uses the file's rotary table, as llama.cpp does.

    A file that rope_patch wrote is patched as its record says. Of others the model is not patched: where they hold
    factors (Llama 3.1's, as llama.cpp's converter writes them) or YaRN, the config describes that table, and a method
    is applied to it as to a checkpoint's own. The weights are dequantized, and can be saved.

    Args:
        path: of the file.
        **from_pretrained: for ``AutoModelForCausalLM.from_pretrained``.

    Raises:
        FileNotFoundError, ValueError: no such file, no whole GGUF model, or a table that changes with the context.
        PatchError: the table that came of it is not the file's.
        ImportError: the package gguf is missing.
    """
    path = Path(path)
    with read_once(path):
        inspection = read_gguf(path)
        with blamed_on(f"{path}: transformers cannot read this GGUF file"):
            options = {**_dequantizing(), **from_pretrained}
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(**in_gguf(path), **options)
        forget_quantization(model)
        model.name_or_path = model.config.name_or_path = str(path)
        for warning in inspection.warnings:
            warnings.warn(f"{path}: {warning}", stacklevel=4)
        put_table(model, inspection, path)
    return model


def _dequantizing() -> dict[str, Any]:
    """Return the argument that has transformers dequantize weights that it may also leave as they are in the file.

    It does that for some families where the package ``kernels`` is installed; such a model cannot be trained or saved.
    """
    config = getattr(transformers, "GgufConfig", None)  # releases without it always dequantize
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def put_table(model: PreTrainedModel, inspection: Inspection, path: Path) -> None:
    """Give a model that transformers made of a GGUF file the table that is in the file.

    Args:
        model: with weights or without.
        inspection: of the file.
        path: of the file.

    Raises:
        PatchError: the table that came of it is not the file's.
    """
    (in_file,) = inspection.tables
    record = inspection.record if not inspection.warnings else None
    if record is not None:
        _as_recorded(model, record)
    elif not _holds(model, in_file):
        kind = _table_like(model, in_file).layer_type
        table = Table(tuple(in_file.inv_freq.tolist()), in_file.attention_scaling)
        patch = apply(model, table, layer_types=None if kind is None else [kind])
        settings = settings_of(locate(model).config)
        patch.restore()
        rebase(model, settings)
    _check_sliding(model, path)
    if not _holds(model, in_file):
        raise PatchError(f"{path} holds another table than the model that was loaded from it: {in_file}")


def weights_in_file(model: nn.Module) -> dict[str, str]:
    """Return what the weights of a model were in the GGUF file it came from, for the description of a measurement.

    Returns:
        ``{"weights": "dequantized Q4_1"}``; nothing for a model that came from elsewhere.
    """
    source = Path(str(locate(model).model.config.name_or_path))
    if not (is_gguf(source) and source.is_file()):
        return {}
    opened = open_gguf(source)
    return {"weights": f"dequantized {opened.weights}" if opened.is_quantized else opened.weights}


def unpack(path: Path, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write the weights and the tokenizer of a GGUF file as those of a plain checkpoint, dequantized.

    Raises:
        ValueError: no whole GGUF model, or one that transformers cannot read.
    """
    with read_once(path):
        model = load_gguf(path, dtype=dtype)
        progress.say("copying the weights, dequantized")
        model.save_pretrained(folder)
        with contextlib.suppress(ValueError):  # a file may hold a vocabulary that transformers cannot read
            read_tokenizer(path).save_pretrained(folder)


def _holds(model: PreTrainedModel, in_file: RotaryTable) -> bool:
    return TableRecord.of(_table_like(model, in_file)).matches(TableRecord.of(in_file), ROUNDED_TWICE)


def _table_like(model: PreTrainedModel, in_file: RotaryTable) -> RotaryTable:
    """Return the table of a model that a file's stands for: that of full attention where there are several."""
    tables = {table.layer_type: table for table in inspect_model(model).tables}
    kind = in_file.layer_type if in_file.layer_type in tables else "full_attention"
    if kind not in tables:
        raise PatchError(f"{type(model).__name__} has no table for {in_file.layer_type}, which the file holds")
    return tables[kind]


def _check_sliding(model: PreTrainedModel, path: Path) -> None:
    """Raise where a file gives layers with a sliding window another base than transformers read."""
    stated = sliding_base(path)
    for table in inspect_model(model).tables:
        if stated is not None and table.layer_type == "sliding_attention" and table.rope_theta != stated:
            raise PatchError(
                f"{path} states a base of {stated:g} for layers with a sliding window, and transformers reads "
                f"{table.rope_theta:g}: it cannot be loaded with its tables"
            )


def _as_recorded(model: PreTrainedModel, record: PatchRecord) -> None:
    """Patch a model as a record says, from the base it was made on: the file states the base of the patched table."""
    rebase(model, record.base_config)
    reapply(model, record)


def forget_quantization(model: PreTrainedModel) -> None:
    """Make a model forget that its weights were quantized in a GGUF file: they are not any more, and can be saved.

    Transformers refuses to save what it read from such a file ("quantized with gguf and is not serializable").
    """
    method = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    if str(getattr(method, "quant_method", "")).rpartition(".")[2].lower() != "gguf":
        return
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        model.__dict__.pop(name, None)
    model.config.__dict__.pop("quantization_config", None)
