"""GGUF files of tiny models, changed copies of them, and a SentencePiece tokenizer made by hand."""

from __future__ import annotations

from pathlib import Path

from tiny import tiny_model
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

import rope_patch
from rope_patch.checkpoints.gguf_file import open_gguf, write_gguf


def saved(folder: Path, method: str | None = None, family: str = "llama", **changes) -> Path:
    """A folder of a tiny random model, patched where a method is given."""
    model = tiny_model(family, vocab_size=1024, **changes)
    if method is None:
        model.save_pretrained(folder)
    else:
        rope_patch.apply(model, method, target_length=256)
        rope_patch.save(model, folder)
    return folder


def rewritten(path: Path, out: Path, keys=None, pieces=None, drop=()) -> Path:
    """A copy of a GGUF with other keys or tensors."""
    reader = open_gguf(path)
    keys = {
        key.name: key for key in [*reader.keys.values(), *(keys or [])] if not key.name.startswith(tuple(drop) or "\0")
    }
    return write_gguf(out, list(keys.values()), list(reader.pieces) if pieces is None else pieces, overwrite=True)


def sentencepiece(normalizer=None):
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "ab", "▁ab"]
    backend = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            [("a", "b"), ("▁", "ab")],
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizer or normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template="{{ messages }}"
    )
