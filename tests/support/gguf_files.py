"""Toy GGUF files: tiny models as llama.cpp's converter writes them, and changed copies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

import rope_patch
from rope_patch.runtime.gguf_file import GGUFFile, Key, Piece, open_gguf, write_gguf
from support.tiny import tiny_model


def saved(folder: Path, method: str | None = None, family: str = "llama", **changes: Any) -> Path:
    """A folder of a tiny random model, which is patched if a method is given."""
    model = tiny_model(family, vocab_size=1024, **changes)
    if method is None:
        model.save_pretrained(folder)
    else:
        rope_patch.apply(model, method, target_length=256)
        rope_patch.save(model, folder)
    return folder


ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    **{name: name for name in ("phi3", "qwen2", "qwen3")},
}


def write_toy(model: Any, path: Path, tokenizer: Any = None, *, factors: Any = None, **keys: Any) -> Path:
    """Write a tiny model with llama.cpp's own writer.

    Args:
        model: a model in memory. If it has one rotary table, the base of the table is written, and nothing else of it.
        path: path of the file that is written.
        tokenizer: a byte-level tokenizer, for a file with a vocabulary; None writes none.
        factors: (pairs,) divisors of the plain frequencies; None writes none.
        keys: other keys of the architecture, with two underscores for a dot, such as ``rope__freq_base_swa=5e3``.
    """
    config = model.config
    architecture = ARCHITECTURES.get(model.config.model_type, "llama")
    writer = gguf.GGUFWriter(path, architecture)
    head_dim = model.model.layers[-1].self_attn.head_dim
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config.vocab_size)
    if "rope_theta" in config.rope_parameters:
        keys |= {"rope__dimension_count": head_dim, "rope__freq_base": float(config.rope_parameters["rope_theta"])}
    else:
        writer.add_sliding_window(config.sliding_window)
    for name, value in keys.items():
        adders = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
        add = adders[type(value)]
        add(f"{architecture}.{name.replace('__', '.')}", value)
    if tokenizer is not None:
        _add_vocabulary(writer, tokenizer, config.vocab_size)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(factors, dtype=np.float32))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        renamed = names.get_name(name, (".weight", ".bias"))
        suffix = "" if renamed.endswith((".weight", ".bias")) else ".weight"
        writer.add_tensor(renamed + suffix, _rows(name, tensor, config, architecture))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _rows(name: str, tensor: Any, config: Any, architecture: str) -> Any:
    """Return a tensor in the form that llama.cpp's graph takes."""
    rows = tensor.detach().float().cpu().numpy()
    # Transformers adds 1 to the norms of Gemma as it runs; llama.cpp does not.
    if architecture == "gemma3" and "norm" in name:
        return rows + np.float32(1)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if architecture == "llama" and heads:  # it pairs neighbouring features, transformers those of a head's two halves
        rows = rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
    return np.ascontiguousarray(rows)


def _add_vocabulary(writer: Any, tokenizer: Any, size: int) -> None:
    """Add a byte-level vocabulary, filled up with unused tokens."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = [tokenizer.convert_ids_to_tokens(i) or f"[PAD{i}]" for i in range(size)]
    special = set(tokenizer.all_special_ids)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in special else 1 if i < len(tokenizer) else 5 for i in range(size)])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(tokenizer("a").input_ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(False)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def gguf_of(keys: Any, pieces: Any = (), alignment: int = 32) -> GGUFFile:
    """Return a file of keys and tensors that is not written yet."""
    return GGUFFile(Path(), {key.name: key for key in keys}, tuple(pieces), alignment)


def rewritten(path: Path, out: Path, keys: Any = None, pieces: Any = None) -> Path:
    """Write a copy of a GGUF file with other keys or tensors.

    Args:
        path: the file that is copied.
        out: the file that is written.
        keys: keys that replace those of their names, or are added.
        pieces: tensors in place of those of the file; None keeps them.
    """
    reader = open_gguf(path)
    keys = [*reader.keys.values(), *(keys or [])]
    return write_gguf(gguf_of(keys, reader.pieces if pieces is None else pieces), out, overwrite=True)


def quantized(path: Path, out: Path, kind: str) -> Path:
    """Write a copy of a file whose matrices are quantized to a type such as ``Q8_0``."""
    to = gguf.GGMLQuantizationType[kind]
    pieces = [
        Piece(p.name, p.shape, to, lambda p=p: gguf.quants.quantize(p.read(), to)) if len(p.shape) > 1 else p
        for p in open_gguf(path).pieces
    ]
    file_type = gguf.LlamaFileType[f"MOSTLY_{kind}"]
    return rewritten(path, out, [Key.of("general.file_type", int(file_type))], pieces)


def stated(path: Path, architecture: str, **values: Any) -> Path:
    """Write a file with the metadata of an architecture and no layers; ``values`` of any kind replace the defaults."""
    numbers = {"embedding_length": 64, "attention.head_count": 4, "context_length": 64, **values}
    keys = [Key.of(f"{architecture}.{name}", value) for name, value in numbers.items()]
    return write_gguf(gguf_of([Key.of("general.architecture", architecture), *keys]), path)
