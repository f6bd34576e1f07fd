"""The weights of a checkpoint as llama.cpp wants them: named, ordered, and read one at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from rope_patch.checkpoints.gguf_file import Key, Piece, gguf
from rope_patch.checkpoints.weight_files import check_weights
from rope_patch.errors import read_json

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_FILE_TYPES = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "bfloat16": "MOSTLY_BF16"}


@dataclass(frozen=True)
class Weights:
    """The tensors of a checkpoint by name, without their numbers.

    Attributes:
        shapes: of every tensor, rows first.
        read: returns one, in the dtype it is kept in.
    """

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]


def weights_of(model: nn.Module) -> Weights:
    """Return the weights of a model in memory.

    Raises:
        ValueError: weights that are not there (on the meta device), or not numbers (quantized).
    """
    tensors = model.state_dict()
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device: load the model with its weights, or export the folder")
        if not tensor.is_floating_point():
            raise ValueError(f"{name} is quantized ({tensor.dtype}): load the model unquantized, or give base=")
    return Weights({name: tuple(t.shape) for name, t in tensors.items()}, lambda name: tensors[name].detach().cpu())


def weights_in(folder: Path, files: ExitStack) -> Weights:
    """Return the weights of a checkpoint's safetensors files, sharded or not.

    Args:
        folder: the checkpoint.
        files: closes them at its end.

    Raises:
        OSError: a missing or damaged shard.
        ValueError: no safetensors.
    """
    check_weights(folder)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        home: dict[str, str] = read_json(index)["weight_map"]
    elif (folder / "model.safetensors").is_file():
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            home = dict.fromkeys(file.keys(), "model.safetensors")
    else:
        raise ValueError(f"{folder} holds no model.safetensors: save it once with save_pretrained")
    opened = {
        name: files.enter_context(safe_open(folder / name, framework="pt")) for name in sorted(set(home.values()))
    }
    try:
        shapes = {name: tuple(opened[where].get_slice(name).get_shape()) for name, where in home.items()}
    except SafetensorError as error:
        raise OSError(f"{index} names tensors that its files do not hold ({error}): copy them again") from error
    return Weights(shapes, lambda name: opened[home[name]].get_tensor(name))


def to_interleaved(rows: Tensor, heads: int) -> Tensor:
    """Reorder the rows of a query or key projection from halves to neighbours.

    In transformers features ``i`` and ``i + d/2`` of a head share an angle, in llama.cpp's Llama graph ``2 i`` and
    ``2 i + 1``.

    Args:
        rows: (heads * d, …) a weight, a bias or the ``B`` of an adapter.
        heads: that the rows belong to.
    """
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def pieces_from(
    weights: Weights, config: Any, architecture: str, dtype: str, *, all_of_them: bool = True
) -> Iterator[Piece]:
    """Yield the tensors of a Llama-shaped checkpoint in llama.cpp's names and layout.

    Args:
        weights: of the checkpoint.
        config: its text config.
        architecture: llama.cpp's; ``llama`` has the rows of queries and keys reordered.
        dtype: ``float32``, ``float16`` or ``bfloat16`` for matrices; vectors are always float32.
        all_of_them: raise at a tensor without a place, rather than pass it by.

    Raises:
        ValueError: a tensor that the graph has no place for.
    """
    package = gguf()
    arch = next(key for key, name in package.MODEL_ARCH_NAMES.items() if name == architecture)
    names = package.get_tensor_name_map(arch, config.num_hidden_layers)
    for name in sorted(weights.shapes, key=_in_order):
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        renamed = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if renamed is None:
            if not all_of_them:
                continue
            raise ValueError(f"llama.cpp's graph for {architecture} has no place for the tensor {name}")
        shape = weights.shapes[name]
        kind = package.GGMLQuantizationType[DTYPES[dtype] if len(shape) > 1 else "F32"]
        heads = heads_of(name, config) if architecture == "llama" else None
        yield Piece(renamed, shape, kind, _reader(weights, name, kind, heads))


def heads_of(name: str, config: Any) -> int | None:
    """Return the number of heads whose rows a projection holds; None where rows are no heads that turn."""
    if "self_attn.q_proj." in name:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if "self_attn.k_proj." in name else None


def _reader(weights: Weights, name: str, kind: Any, heads: int | None) -> Callable[[], np.ndarray[Any, Any]]:
    def read() -> np.ndarray[Any, Any]:
        tensor = weights.read(name).float()
        if kind.name == "F16" and float(tensor.abs().max()) > torch.finfo(torch.float16).max:
            raise ValueError(f"{name} holds numbers too large for float16: export in bfloat16 or float32")
        rows = (tensor if heads is None else to_interleaved(tensor, heads)).contiguous().numpy()
        written: np.ndarray[Any, Any] = gguf().quants.quantize(rows, kind)
        return written

    return read


def _in_order(name: str) -> tuple[int, str]:
    layer = re.search(r"\.layers\.(\d+)\.", name)
    if layer:
        return int(layer[1]), name
    return (-1 if "embed_tokens" in name else 1 << 30), name


def llama_keys(config: Any, name: str, dtype: str) -> list[Key]:
    """Return the keys that describe a Llama-shaped model to llama.cpp, all but its table and vocabulary.

    Raises:
        ValueError: a shape that llama.cpp's Llama graph does not compute.
    """
    package = gguf()
    if config.hidden_act != "silu":
        raise ValueError(f"llama.cpp's graph for llama computes silu, and this model {config.hidden_act}")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    numbers = {
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
    }
    return [
        Key.of("general.architecture", "llama", "STRING"),
        Key.of("general.type", "model", "STRING"),
        Key.of("general.name", name, "STRING"),
        Key.of("general.file_type", int(package.LlamaFileType[_FILE_TYPES[dtype]]), "UINT32"),
        Key.of("general.quantization_version", package.GGML_QUANT_VERSION, "UINT32"),
        *(Key.of(f"llama.{key}", int(value), "UINT32") for key, value in numbers.items()),
        Key.of("llama.attention.layer_norm_rms_epsilon", float(config.rms_norm_eps), "FLOAT32"),
    ]
