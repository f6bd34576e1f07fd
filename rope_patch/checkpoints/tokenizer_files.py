"""The tokenizer of a checkpoint, and its files on this disk."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rope_patch.checkpoints.adapters import find_file
from rope_patch.checkpoints.source_files import config_json, named_for_transformers
from rope_patch.patching.older_keys import text_part
from rope_patch.runtime.errors import in_one_line
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


def read_tokenizer(source: str | Path, **options: Any) -> PreTrainedTokenizerBase:
    """Return a checkpoint's own tokenizer.

    Args:
        source: folder, hub id or GGUF file.
        **options: arguments of ``AutoTokenizer.from_pretrained``.

    Raises:
        ValueError: the checkpoint has no tokenizer that can be loaded; the message says why.
    """
    folder = Path(source)
    # For a folder without these files transformers may make an empty tokenizer.
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(f"{source} has no tokenizer: copy the files of its base model there, such as tokenizer.json")
    with named_for_transformers(source) as named:
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(**named, **options)
        except Exception as error:  # there are many kinds, since it reads config.json, too
            raise ValueError(f"{source} has no tokenizer that can be loaded: {in_one_line(error)}") from error
    # Of a GGUF file transformers names the folder, in which there may be several.
    tokenizer.name_or_path = str(source)
    return tokenizer


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
