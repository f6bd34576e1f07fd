"""Load a GGUF file with the rotary table that it holds, of which transformers' own reader takes only the base."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from rope_patch.checkpoints.source_files import named_for_transformers
from rope_patch.checkpoints.tokenizer_files import read_tokenizer
from rope_patch.gguf.table import ROUNDED_TWICE, read_gguf
from rope_patch.methods import Method
from rope_patch.methods.scaling import as_stated, owner_of
from rope_patch.methods.table import Table
from rope_patch.patching.config_settings import settings_of
from rope_patch.patching.install import patched, reapply, rebase
from rope_patch.patching.locate import PatchError, locate
from rope_patch.patching.record import TableRecord
from rope_patch.patching.verify import Inspection, inspect_model
from rope_patch.runtime import progress
from rope_patch.runtime.errors import as_value_error
from rope_patch.runtime.gguf_headers import cached_headers
from rope_patch.tables import RotaryTable


def load_gguf(path: str | Path, **from_pretrained: Any) -> PreTrainedModel:
    """Load a GGUF file as a model of transformers that uses the file's rotary table, as llama.cpp does.

    A model from a file that rope_patch wrote is patched as the file's record says. A model from another file is not
    patched: if the file holds factors (Llama 3.1's, as llama.cpp's converter writes them) or YaRN, the config describes
    that table, and a method is applied to it as to a checkpoint's own. The weights are dequantized, and can be saved.

    Args:
        path: path of the GGUF file.
        **from_pretrained: arguments of ``AutoModelForCausalLM.from_pretrained``.

    Raises:
        FileNotFoundError, ValueError: there is no such file, it is not a whole GGUF model, or its table changes with
            the context.
        PatchError: the model's table is not the one in the file.
        ImportError: the package gguf is missing.
    """
    path = Path(path)
    with named_for_transformers(path) as named:
        inspection = read_gguf(path)
        # Otherwise the weights of some families stay as they are in the file where the package `kernels` is installed,
        # and such a model cannot be trained or saved.
        options = {"quantization_config": GgufConfig(dequantize=True), **from_pretrained}
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(**named, **options)
        forget_quantization(model)
        model.name_or_path = model.config.name_or_path = str(path)
        for warning in inspection.warnings:
            warnings.warn(f"{path}: {warning}", stacklevel=4)
        put_table(model, inspection, path)
    return model


def put_table(model: PreTrainedModel, inspection: Inspection, path: Path) -> None:
    """Give a model that transformers made from a GGUF file the table that is in the file.

    Args:
        model: the model, with weights or without.
        inspection: the inspection of the file.
        path: path of the file.

    Raises:
        PatchError: the model's table is not the one in the file.
    """
    in_file = inspection.tables[0]
    # A record that does not fit the file's table is not followed: llama.cpp reads the table, not the record.
    record = inspection.record if not inspection.warnings else None
    if record is not None:
        # transformers read the model's own settings from the file, which describes the patched table: they are no base.
        with as_value_error(f"{path}: transformers cannot build the table before the patch from its record"):
            rebase(model, record.base_config)
            reapply(model, record)
    elif not _has_same_table(model, in_file):
        kind = _table_like(model, in_file).layer_type
        method: Method = Table(tuple(in_file.inv_freq.tolist()), in_file.attention_scaling)
        owner = owner_of(in_file)
        if owner is not None:
            method = as_stated(owner, in_file.rope_parameters or {})
        # A patch is made only to find settings that encode the table. They then become the model's own, unpatched.
        with patched(model, method, layer_types=None if kind is None else [kind]):
            settings = settings_of(locate(model).config)
        rebase(model, settings)
    for stated in inspection.tables:
        if not _has_same_table(model, stated):
            raise PatchError(
                f"{path} cannot be loaded with its tables: it holds {stated}, and transformers computes "
                f"{_table_like(model, stated)}"
            )


def unpack(path: Path, folder: Path, dtype: str) -> None:
    """Write the dequantized weights and the tokenizer of a GGUF file as those of a plain checkpoint.

    Args:
        path: path of the GGUF file.
        folder: the folder that is written.
        dtype: data type of the weights. In bfloat16 the folder is half as large as in float32, and the distribution of
            the next token differs by a KL divergence below .0001 (``docs/serving.md``).

    Raises:
        ValueError: the file is not a whole GGUF model, or transformers cannot read it.
    """
    with cached_headers(path):
        progress.say(f"dequantizing the weights to {dtype}")
        model = load_gguf(path, dtype=dtype)
        model.save_pretrained(folder)
        with contextlib.suppress(ValueError):  # a file may hold a vocabulary that transformers cannot read
            read_tokenizer(path).save_pretrained(folder)


def _has_same_table(model: PreTrainedModel, in_file: RotaryTable) -> bool:
    return TableRecord.of(_table_like(model, in_file)).matches(TableRecord.of(in_file), ROUNDED_TWICE)


def _table_like(model: PreTrainedModel, in_file: RotaryTable) -> RotaryTable:
    """Return the model's table to which the one in a file belongs: that of full attention if there are several."""
    tables = {table.layer_type: table for table in inspect_model(model).tables}
    kind = in_file.layer_type if in_file.layer_type in tables else "full_attention"
    if kind not in tables:
        raise PatchError(f"{type(model).__name__} has no table for {in_file.layer_type}, which the file holds")
    return tables[kind]


def forget_quantization(model: PreTrainedModel) -> None:
    """Remove from a model the note that its weights were quantized in a GGUF file; they are dequantized now.

    With it transformers refuses to save the model ("quantized with gguf and is not serializable").
    """
    method = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    if str(getattr(method, "quant_method", "")).rpartition(".")[2].lower() != "gguf":
        return
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        model.__dict__.pop(name, None)
    model.config.__dict__.pop("quantization_config", None)
