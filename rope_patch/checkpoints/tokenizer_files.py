"""The files of the tokenizer that belongs to a model, found on this disk."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from pathlib import Path

from transformers import PreTrainedModel

from rope_patch.checkpoints.adapters import CONFIG_FILE, find_file
from rope_patch.checkpoints.source_files import read_tokenizer
from rope_patch.errors import read_json
from rope_patch.patching.older_keys import text_part
from rope_patch.runtime.folders import is_gguf

_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)
_SETTINGS = (
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
TOKENIZER_FILES = (*_VOCABULARIES, *_SETTINGS)
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
    if is_gguf(source):
        # The file may have been moved, or hold a vocabulary that transformers cannot read.
        with contextlib.suppress(ValueError, OSError):
            read_tokenizer(source).save_pretrained(folder)
        return
    hub = {"local_files_only": True, "revision": getattr(model.config, "_commit_hash", None)}
    config = find_file(source, CONFIG_FILE, **hub)
    # Settings alone, without a vocabulary, make no tokenizer.
    if config is None or not any(find_file(source, name, **hub) for name in _VOCABULARIES):
        return
    try:
        of_source = text_part(read_json(config)).get("vocab_size")
    except OSError:  # the folder was damaged since the model was loaded
        return
    # A model whose embeddings were resized has tokens that the old tokenizer lacks.
    size = model.config.get_text_config().vocab_size
    if of_source is not None and of_source != size:
        warnings.warn(
            f"the model has {size} tokens in its vocabulary, and {source}, which it came from, has {of_source}: that "
            "tokenizer is not saved beside it. Give the model's own with tokenizer=, or tokenizer=False",
            stacklevel=3,
        )
        return
    for name in TOKENIZER_FILES:
        if (path := find_file(source, name, **hub)) is not None:
            shutil.copyfile(path, folder / name)
