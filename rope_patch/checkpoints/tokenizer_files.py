"""The files of the tokenizer that belongs to a model, found on this disk."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from pathlib import Path

from transformers import PreTrainedModel

from rope_patch.checkpoints.adapters import find_file
from rope_patch.checkpoints.source_files import config_json, read_tokenizer
from rope_patch.patching.older_keys import text_part
from rope_patch.runtime.folders import is_gguf

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""The names of the files that may belong to a tokenizer."""


def copy_tokenizer(model: PreTrainedModel, folder: Path, *, beside: Path) -> None:
    """Copy the tokenizer's files of the checkpoint that a model came from, if that checkpoint is known.

    It is the folder or the hub repository that ``model.config.name_or_path`` names. Of a repository only files in the
    local cache are taken, so nothing is downloaded. From a GGUF file its vocabulary is converted.

    Args:
        model: the model that is saved.
        folder: the folder into which the files are copied.
        beside: the folder that ``folder`` will become; a tokenizer that is in it already stays as it is.
    """
    source = str(getattr(model.config, "name_or_path", "") or "")
    if not source or any((beside / name).is_file() for name in TOKENIZER_FILES):
        return
    hub = {"local_files_only": True, "revision": getattr(model.config, "_commit_hash", None)}
    size = model.config.get_text_config().vocab_size
    try:
        of_source = text_part(config_json(source, **hub)).get("vocab_size")
        files = list(filter(None, [find_file(source, name, **hub) for name in TOKENIZER_FILES]))
    except (ValueError, OSError):  # it was moved or damaged since the model was loaded
        return
    if not files and not is_gguf(source):
        return
    # A model whose embeddings were resized has tokens that the old tokenizer lacks.
    if of_source not in (None, size):
        warnings.warn(
            f"the model has {size} tokens in its vocabulary, and {source}, which it came from, has {of_source}: that "
            "tokenizer is not saved beside it. Give the model's own with tokenizer=, or tokenizer=False",
            stacklevel=3,
        )
        return
    if is_gguf(source):
        with contextlib.suppress(ValueError):  # it may hold a vocabulary that transformers cannot read
            read_tokenizer(source).save_pretrained(folder)
        return
    for path in files:
        shutil.copyfile(path, folder / path.name)
