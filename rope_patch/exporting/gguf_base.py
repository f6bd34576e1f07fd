"""Whether a GGUF file is that of the model a table was made for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rope_patch.checkpoints.gguf_file import GGUFFile, Piece, gguf
from rope_patch.checkpoints.gguf_table import FACTOR_TENSORS, Graph, same_table, table_in
from rope_patch.exporting.gguf_weights import Weights, pieces_from
from rope_patch.patching.locate import PatchError
from rope_patch.patching.record import TableRecord
from rope_patch.tables import RotaryTable


def check_base(
    reader: GGUFFile,
    path: Path,
    config: Any,
    graph: Graph,
    table: RotaryTable,
    before: TableRecord,
    weights: Weights | None,
) -> None:
    """Raise unless a GGUF file holds this model as it was before the patch, in whatever quantization.

    Its own factors are no fault where they are the table the patch began with, as in GGUFs of Llama 3.1: the new table
    stands for itself and takes their place.

    Args:
        reader: of the file.
        path: to it.
        config: the model's text config.
        graph: llama.cpp's for it.
        table: the table to write.
        before: the table before the patch.
        weights: of the checkpoint, to compare norms and the first layer with; None to trust the shapes.

    Raises:
        PatchError: it is patched already, or carries another table.
        ValueError: it is another model's.
    """
    pieces = list(reader.pieces)
    _check_shape(reader, pieces, path, config, graph, table)
    _check_table(reader, path, before)
    if weights is not None:
        _check_weights(pieces, path, weights, config, graph)


def _check_shape(
    reader: GGUFFile, pieces: list[Piece], base: Path, config: Any, graph: Graph, table: RotaryTable
) -> None:
    architecture = reader.value("general.architecture")
    if architecture != graph.architecture:
        raise ValueError(f"{base} is a GGUF of {architecture!r}, and {config.model_type} is {graph.architecture!r}")
    expected = {
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.dimension_count": table.rotary_dim,
    }
    stated = {name: reader.value(f"{architecture}.{name}") for name in expected}
    shapes = {piece.name: piece.shape for piece in pieces}
    if "token_embd.weight" not in shapes:
        raise ValueError(f"{base} holds no weights (token_embd.weight): it is a vocabulary, or a part of a model")
    stated["vocabulary"], expected["vocabulary"] = shapes["token_embd.weight"][0], config.vocab_size
    for name, value in stated.items():
        # None where the file does not state it; a list has one value per layer.
        if isinstance(value, int) and value != expected[name]:
            raise ValueError(f"{base} is a GGUF of another model: its {name} is {value}, here it is {expected[name]}")


def _check_table(reader: GGUFFile, base: Path, before: TableRecord) -> None:
    """Raise unless a base turns as the model did before the patch: else it is another, or is patched already."""
    in_file = table_in(reader, base)
    table = in_file.tables[0]
    if same_table(TableRecord.of(table), before):
        return
    if in_file.record is not None:
        raise PatchError(
            f"{base} is patched already, with {in_file.record.to_method()}: give the GGUF of the base model"
        )
    carries = "factors of its own" if any(piece.name in FACTOR_TENSORS for piece in reader.pieces) else "another table"
    raise PatchError(
        f"{base} carries {carries} (rope_theta {table.rope_theta:g}, attention_scaling {table.attention_scaling:g}, "
        f"table {table.fingerprint}), not the one this model had before the patch ({before.hash}): give the GGUF of "
        "the base model"
    )


def _check_weights(pieces: list[Piece], base: Path, weights: Weights, config: Any, graph: Graph) -> None:
    """Raise where norms, or the first layer's matrices, are plainly not this checkpoint's."""
    theirs = {piece.name: piece for piece in pieces}
    package = gguf()
    for own in pieces_from(weights, config, graph.architecture, "float32", all_of_them=False):
        other = theirs.get(own.name)
        if other is None or not (len(own.shape) == 1 or own.name.startswith("blk.0.")):
            continue
        if other.shape != own.shape:
            raise ValueError(f"{base} is a GGUF of another model: {own.name} is {other.shape}, here it is {own.shape}")
        try:
            numbers = package.quants.dequantize(other.read(), other.kind)
        except NotImplementedError:
            continue
        mine = own.read()
        limit = {"F32": 0.005, "F16": 0.005, "BF16": 0.005, "Q8_0": 0.03}.get(other.kind.name, 0.8)
        off = float(np.linalg.norm(numbers - mine) / max(float(np.linalg.norm(mine)), 1e-30))
        if off > limit:  # bfloat16 is 0.002 off, Q8_0 0.005, two bits a third, another model 1
            raise ValueError(f"{base} is a GGUF of other weights: {own.name} is off by {off:.1%}. Was one fine-tuned?")
