"""GGUF files of patched models, for llama.cpp and what is built on it."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from rope_patch.checkpoints.adapters import is_adapter
from rope_patch.checkpoints.gguf_file import Progress, check_out, gguf, open_gguf, write_gguf
from rope_patch.checkpoints.gguf_patch import with_table, write
from rope_patch.checkpoints.gguf_table import (
    Graph,
    graph_of,
    read_gguf,
    table_keys,
    table_pieces,
)
from rope_patch.checkpoints.offline import skeleton
from rope_patch.checkpoints.reading import read_tokenizer
from rope_patch.errors import blamed_on
from rope_patch.exporting.gguf_base import check_base
from rope_patch.exporting.gguf_lora import export_gguf_lora as export_gguf_lora
from rope_patch.exporting.gguf_vocab import vocabulary_keys
from rope_patch.exporting.gguf_weights import DTYPES, Weights, llama_keys, pieces_from, weights_in, weights_of
from rope_patch.packaged import name_of
from rope_patch.patching.base_tables import is_dynamic
from rope_patch.patching.locate import find_rotary
from rope_patch.patching.module import PatchedRotary
from rope_patch.patching.record import PatchRecord, TableRecord
from rope_patch.patching.verify import inspect_model, verify_model
from rope_patch.tables import RotaryTable

__all__ = ["export_gguf", "export_gguf_lora", "read_gguf"]

_FROM_HUB = ["*.json", "*.safetensors", "*.jinja"]


def export_gguf(
    source: str | Path | nn.Module,
    out: str | Path,
    *,
    base: str | Path | None = None,
    weights: str | Path | None = None,
    name: str | None = None,
    dtype: str = "float16",
    tokenizer: Any = None,
    overwrite: bool = False,
    on_progress: Progress = lambda name: None,
) -> Path:
    """Write a GGUF of a model with its rotary table, which an unmodified llama.cpp runs.

    With ``base``, a GGUF of the same model before the patch in any quantization, its tensors are copied byte for byte
    and only the table is new: that takes the checkpoint's config alone. Without, a Llama or Mistral checkpoint is
    written from its weights. Either way one tensor is in memory at a time, and the file appears whole or not at all.

    A factor on cos and sin other than 1 (YaRN's) is exact in llama.cpp, except after a context shift: that rotates kept
    keys once more, and scales them once more too.

    Args:
        source: folder or hub id of a checkpoint, or a model in memory; patched or not.
        out: the file, ``*.gguf``.
        base: GGUF file of the model before the patch.
        weights: folder or hub id of the weights, where ``source`` is a model without them (on the meta device).
        name: ``general.name`` of a file written without ``base``; by default the folder's.
        dtype: of matrices written without ``base``: ``float32``, ``float16`` or ``bfloat16``.
        tokenizer: to write without ``base``; by default the one in the checkpoint's folder.
        overwrite: replace a file that exists.
        on_progress: called with the name of each tensor before it is written.

    Returns:
        ``out``.

    Raises:
        PatchError: the model does not use what its record says, or ``base`` carries another table than the patch began
            with.
        ValueError: a family or table llama.cpp cannot express, a ``base`` of another model, an unknown dtype.
        OSError: nothing to load, an unwritable ``out``, a full disk; ``out`` is then as it was.
        ImportError: the package gguf is missing.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    gguf()
    out = check_out(out, overwrite=overwrite)
    _check_source(source, out, base)
    model = _bare(source) if isinstance(source, nn.Module) else skeleton(source)
    place = weights if weights is not None else None if isinstance(source, nn.Module) else source
    config: Any = find_rotary(model).config
    graph = graph_of(config.model_type)
    table, before, record = _table(model, graph)
    _warn_of_window(config, graph, table)
    with ExitStack() as files:
        if base is not None:
            reader = open_gguf(base)
            at_hand = _weights_at_hand(model if place is None else place, files)
            check_base(reader, Path(base), config, graph, table, before, at_hand)
            patched = with_table(reader, table, graph, record)
            return write(patched, out, overwrite=overwrite, progress=on_progress)
        _check_writable(config, graph)
        folder = None if place is None else _folder(place)
        tokenizer = _tokenizer(tokenizer, folder)
        own = weights_of(model) if folder is None else weights_in(folder, files)
        name = name or (type(model).__name__ if place is None else name_of(str(place)))
        keys = [*llama_keys(config, name, dtype), *table_keys(table, graph, record)]
        keys += vocabulary_keys(tokenizer, config.vocab_size)
        files.enter_context(blamed_on(f"{place or type(model).__name__}: the weights do not fit the config"))
        pieces = [*table_pieces(table, graph), *pieces_from(own, config, graph.architecture, dtype)]
        return write_gguf(out, keys, pieces, overwrite=overwrite, progress=on_progress)


# --- the model -------------------------------------------------------------------------------------------------------


def _table(model: nn.Module, graph: Graph) -> tuple[RotaryTable, TableRecord, PatchRecord | None]:
    """Return the one table a GGUF can hold, the one before the patch, and the record."""
    location = find_rotary(model)
    record = verify_model(model) if location.record is not None or isinstance(location.module, PatchedRotary) else None
    tables = {table.layer_type: table for table in inspect_model(model).tables}
    for table in tables.values():
        if table.rope_parameters is not None and is_dynamic(table.rope_parameters, table.rope_type):
            raise ValueError(f"{table.path} has a dynamic table: freeze it first, rope-patch apply --freeze-at LENGTH")
    if record is not None and record.precision != "float32":
        warnings.warn(f"llama.cpp computes angles in float32, this patch in {record.precision}", stacklevel=3)
    if set(tables) == {None}:
        return tables[None], record.base_tables["all"] if record else TableRecord.of(tables[None]), record
    full, others = tables.get("full_attention"), [s for kind, s in tables.items() if kind != "full_attention"]
    if full is None or graph.architecture != "gemma4":
        raise ValueError(f"{type(model).__name__} has a table per layer type, and a GGUF of it holds one")
    for other in others:
        if not other.is_geometric:
            raise ValueError(f"llama.cpp takes factors for full_attention alone, and {other.layer_type} is patched too")
    if full.attention_scaling != 1.0:
        raise ValueError(
            f"the full_attention table multiplies cos and sin by {full.attention_scaling:g}: llama.cpp has one such "
            "factor for all layers, and would scale the sliding ones too"
        )
    return full, record.base_tables["full_attention"] if record else TableRecord.of(full), record


def _check_writable(config: Any, graph: Graph) -> None:
    """Raise ValueError for a model whose tensors cannot be written without a GGUF of the base."""
    if graph.architecture != "llama":
        raise ValueError(f"without a GGUF of the base only Llama and Mistral are written, not {config.model_type}")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError("the checkpoint is quantized: dequantize it first, or give a GGUF of the base model")


def _check_source(source: str | Path | nn.Module, out: Path, base: str | Path | None) -> None:
    """Raise ValueError for an adapter, and for a base that would be overwritten."""
    if base is not None and Path(base).resolve() == out:
        raise ValueError(f"{out} is the base itself: give another output file")
    if not isinstance(source, nn.Module) and is_adapter(source):
        raise ValueError(
            f"{source} is an adapter: merge it into its base and export that, or export the base's GGUF and the "
            "adapter beside it with export_gguf_lora"
        )


def _warn_of_window(config: Any, graph: Graph, table: RotaryTable) -> None:
    window = getattr(config, "sliding_window", None)
    if graph.architecture != "gemma4" and window is not None and window < table.max_position_embeddings:
        warnings.warn(
            f"this model attends to the last {window} tokens; llama.cpp's graph for {graph.architecture} knows no "
            "window and attends to all: beyond it, logits differ from transformers'",
            stacklevel=3,
        )


def _bare(model: nn.Module) -> nn.Module:
    if find_rotary(model).model is not model or hasattr(model, "peft_config"):
        raise ValueError(f"{type(model).__name__} wraps a model: merge adapters (merge_and_unload) and unwrap it first")
    return model


def _folder(source: str | Path) -> Path:
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(source), allow_patterns=_FROM_HUB))


def _tokenizer(tokenizer: Any, folder: Path | None) -> Any:
    if tokenizer is not None and not isinstance(tokenizer, str | Path):
        return tokenizer
    where = tokenizer or folder
    if where is None:
        raise ValueError("a GGUF holds a tokenizer: give tokenizer= with a model in memory")
    return read_tokenizer(where)


def _weights_at_hand(source: str | Path | nn.Module, files: ExitStack) -> Weights | None:
    """Return weights to compare a base with, where that takes no download; a config alone is enough to patch."""
    if isinstance(source, nn.Module):
        real = not any(tensor.is_meta or not tensor.is_floating_point() for tensor in source.state_dict().values())
        return weights_of(source) if real else None
    folder = Path(source)
    return weights_in(folder, files) if folder.is_dir() and any(folder.glob("model*.safetensors")) else None
