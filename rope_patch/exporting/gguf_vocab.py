"""A tokenizer as llama.cpp keeps one: the two kinds that Llama and Mistral checkpoints have."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rope_patch.checkpoints.gguf_file import Key, gguf

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_GIVE_BASE = "give a GGUF of the base model (--gguf), which has its tokenizer"


def vocabulary_keys(tokenizer: Any, vocab_size: int) -> list[Key]:
    """Return the ``tokenizer.*`` keys of a tokenizer.

    Two kinds are known: byte-level BPE, whose way to split text must be one that llama.cpp has a name for, and
    SentencePiece BPE with byte fallback, as Llama 2 and Mistral have it. For the latter llama.cpp merges by the score
    of what comes out, where ``tokenizer.json`` ranks the merges: so a token's score is minus the rank of the first
    merge that makes it.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: rows of the model's embedding; rows without a token are filled up with unused ones.

    Raises:
        ValueError: another kind of tokenizer, or one with more tokens than rows.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"GGUF export reads tokenizer.json, and this tokenizer has none: {_GIVE_BASE}")
    spec = json.loads(backend.to_str())
    model = spec["model"]
    if model["type"] != "BPE":
        raise ValueError(f"GGUF export knows no {model['type']} tokenizers: {_GIVE_BASE}")
    added = {token["id"]: token for token in spec["added_tokens"]}
    tokens = {index: token for token, index in model["vocab"].items()}
    tokens.update({index: token["content"] for index, token in added.items()})
    if max(tokens) >= vocab_size:
        raise ValueError(f"the tokenizer has tokens up to {max(tokens)}, and the model {vocab_size} rows for them")
    types = [_type(tokens.get(i), added.get(i), i == tokenizer.unk_token_id) for i in range(vocab_size)]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    if model["byte_fallback"]:
        own = _sentencepiece(spec, tokens, merges, vocab_size)
    else:
        own = [
            Key.of("tokenizer.ggml.model", "gpt2", "STRING"),
            Key.of("tokenizer.ggml.pre", _pre_tokenizer(spec), "STRING"),
            *([Key.of("tokenizer.ggml.merges", merges, "ARRAY", "STRING")] if merges else []),
        ]
    listed = [tokens.get(i, f"[PAD{i}]") for i in range(vocab_size)]
    return [
        *own,
        Key.of("tokenizer.ggml.tokens", listed, "ARRAY", "STRING"),
        Key.of("tokenizer.ggml.token_type", types, "ARRAY", "INT32"),
        *_special(tokenizer),
    ]


def _type(token: str | None, added: Mapping[str, Any] | None, is_unknown: bool) -> int:
    kinds = gguf().TokenType
    if token is None:
        return int(kinds.UNUSED)
    if is_unknown:
        return int(kinds.UNKNOWN)
    if added is not None:
        return int(kinds.CONTROL if added["special"] else kinds.USER_DEFINED)
    return int(kinds.BYTE if _BYTE.fullmatch(token) else kinds.NORMAL)


def _pre_tokenizer(spec: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for the way a byte-level tokenizer splits text before it merges."""
    splits = _flat(spec["pre_tokenizer"], "pretokenizers")
    shape = [(split["type"], split.get("use_regex", split.get("individual_digits"))) for split in splits]
    if spec["normalizer"] is None and splits and not splits[-1].get("add_prefix_space"):
        if shape == [("ByteLevel", True)]:
            return "gpt-2"
        if shape == [("Digits", True), ("ByteLevel", True)]:
            return "smollm"
        if [name for name, _ in shape] == ["Split", "ByteLevel"] and shape[1][1] is False:
            regex = splits[0]["pattern"].get("Regex")
            known = {_LLAMA3: "llama-bpe", _TEKKEN: "tekken"}
            if splits[0]["behavior"] == "Isolated" and not splits[0]["invert"] and regex in known:
                return known[regex]
    raise ValueError(f"llama.cpp may split text otherwise than this byte-level tokenizer does: {_GIVE_BASE}")


def _sentencepiece(
    spec: Mapping[str, Any], tokens: Mapping[int, str], merges: Sequence[str], vocab_size: int
) -> list[Key]:
    normalizers, splits = _flat(spec["normalizer"], "normalizers"), _flat(spec["pre_tokenizer"], "pretokenizers")
    known = {("Prepend", "▁"), ("Replace", "▁"), ("Metaspace", "▁")}
    shape = [(step["type"], step.get("prepend", step.get("content", step.get("replacement")))) for step in normalizers]
    shape += [(step["type"], step.get("replacement")) for step in splits]
    if not shape or not set(shape) <= known or any(step.get("split", False) for step in splits):
        raise ValueError(f"llama.cpp may write text otherwise than this SentencePiece tokenizer does: {_GIVE_BASE}")
    prefix = ("Prepend", "▁") in shape or any(step.get("prepend_scheme", "always") != "never" for step in splits)
    rank: dict[str, int] = {}
    for position, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", ""), position)
    scores = [-float(rank.get(tokens.get(i, ""), len(merges))) for i in range(vocab_size)]
    return [
        Key.of("tokenizer.ggml.model", "llama", "STRING"),
        Key.of("tokenizer.ggml.pre", "default", "STRING"),
        Key.of("tokenizer.ggml.scores", scores, "ARRAY", "FLOAT32"),
        Key.of("tokenizer.ggml.add_space_prefix", prefix, "BOOL"),
    ]


def _flat(step: Mapping[str, Any] | None, inside: str) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    return list(step[inside]) if step["type"] == "Sequence" else [step]


def _special(tokenizer: Any) -> list[Key]:
    """Return what llama.cpp adds around a text, as this tokenizer does, and the template of a chat."""
    names = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
    names |= {"unknown": tokenizer.unk_token_id, "padding": tokenizer.pad_token_id}
    keys = [Key.of(f"tokenizer.ggml.{name}_token_id", i, "UINT32") for name, i in names.items() if i is not None]
    around = tokenizer("a").input_ids
    keys.append(Key.of("tokenizer.ggml.add_bos_token", around[0] == tokenizer.bos_token_id, "BOOL"))
    keys.append(Key.of("tokenizer.ggml.add_eos_token", around[-1] == tokenizer.eos_token_id, "BOOL"))
    if isinstance(tokenizer.chat_template, str):
        keys.append(Key.of("tokenizer.chat_template", tokenizer.chat_template, "STRING"))
    return keys
