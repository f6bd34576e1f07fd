"""The documents of a run as a ``datasets`` dataset, and those among them that are kept from training."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetGenerationError
from transformers import PreTrainedTokenizerBase

from rope_patch.options.finetune import RecipeOptions
from rope_patch.texts.builtin_text import builtin_text

READERS = {".txt": "text", ".md": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
"""Suffix of a file to the reader of ``datasets``."""

DOCUMENTS_CHECKED = 1000
"""Number of documents that are searched for one as long as a row; if there is none among them, the run is refused."""

ROLES = {"human": "user", "gpt": "assistant"}
"""The roles of ShareGPT by other names than chat templates have for them."""


def read_documents(options: RecipeOptions) -> datasets.Dataset:
    """Return the documents of a run; conversations are in a column ``messages``, with the keys of chat templates.

    Raises:
        FileNotFoundError: there is no such file, folder or dataset.
        ValueError: the folder holds files of several kinds or of none, or a file cannot be read.
    """
    data = options.data
    path = Path(data.source)
    if data.source == "builtin":
        documents = builtin_documents("train", options)
    elif path.is_dir() or path.suffix in READERS:
        files = text_files(path)
        kinds = {READERS[file.suffix] for file in files}
        if len(kinds) != 1:
            raise ValueError(f"data.source: {path} must hold files of one kind, of {', '.join(READERS)}")
        arguments = {}
        if kinds == {"text"}:
            # By default datasets takes every line of a text file for a document.
            arguments["sample_by"] = "document"
        try:
            documents = datasets.load_dataset(kinds.pop(), data_files=[*map(str, files)], split="train", **arguments)
        except (DatasetGenerationError, StopIteration) as error:  # StopIteration: a JSON file is empty
            raise ValueError(f"data.source: cannot read {path}: {error.__cause__ or 'it is empty'}") from error
    elif data.documents is not None:
        stream = datasets.load_dataset(data.source, data.config, split=data.split, streaming=True)
        documents = datasets.Dataset.from_list(list(stream.take(data.documents)))
    else:
        documents = datasets.load_dataset(data.source, data.config, split=data.split)
    documents = documents.select(range(min(len(documents), data.documents or len(documents))))
    if "conversations" in documents.column_names and "messages" not in documents.column_names:
        documents = documents.map(as_messages, remove_columns="conversations")
    return documents


def as_messages(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the messages of a conversation of ShareGPT; TRL's own conversion would keep the roles human and gpt."""
    messages = []
    for turn in document["conversations"]:
        if "from" in turn:
            turn = {"role": ROLES.get(turn["from"], turn["from"]), "content": turn["value"]}
        messages.append(turn)
    return {"messages": messages}


def builtin_documents(split: str, options: RecipeOptions) -> datasets.Dataset:
    """Return the documents of a split of the text that ships with rope_patch."""
    return datasets.Dataset.from_dict({text_column(options): list(builtin_text(split).documents)})


def text_column(options: RecipeOptions) -> str:
    """Return the name of the column that holds texts; TRL's own default is the same."""
    return str(options.train.get("dataset_text_field", "text"))


def text_files(source: str | Path) -> list[Path]:
    """Return the files of a source of documents: those of a folder, or the source itself, which may be no file."""
    path = Path(source)
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.suffix in READERS)
    return [path]


def length_of(document: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, options: RecipeOptions) -> int:
    """Return the length of a document: a text, a conversation, or a prompt with its completion [tokens].

    Raises:
        ValueError: the document has none of them in the columns that TRL reads.
    """
    column = text_column(options)
    content = document.get("messages") or document.get(column)
    if "prompt" in document and "completion" in document:
        content = document["prompt"] + document["completion"]
    if isinstance(content, list):
        return len(tokenizer.apply_chat_template(content, return_dict=False))
    if not isinstance(content, str):
        raise ValueError(
            f"there is no text in a column {column!r}, no conversation in a column 'messages', and no 'prompt' with a "
            f"'completion': the data has {', '.join(document)}. train.dataset_text_field names the column of texts"
        )
    return len(tokenizer(content, verbose=False).input_ids)


def check_documents(documents: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, options: RecipeOptions) -> None:
    """Refuse data in which no document is as long as a row, and so no two tokens are a row apart.

    Raises:
        ValueError: no document is as long as a row, and ``data.allow_short`` is not set; there is none at all; or TRL
            cannot tell the turns of the assistant from others.
    """
    if options.train.get("assistant_only_loss"):
        _check_turns(documents, tokenizer, options)
    longest = 0
    for document in itertools.islice(documents, DOCUMENTS_CHECKED):
        longest = max(longest, length_of(document, tokenizer, options))
        if longest and (options.data.allow_short or longest >= options.max_length):
            return
    if not longest:
        raise ValueError(f"data.source: {options.data.source} holds no text")
    raise ValueError(
        f"no document is as long as a row: the longest has {longest} tokens, a row has {options.max_length}, so "
        "nothing could be learned about such distances. Give longer documents or a shorter train.max_length, or set "
        "data.allow_short=true to train on short documents joined into rows"
    )


def _check_turns(documents: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, options: RecipeOptions) -> None:
    """Ask TRL, as its trainer does, for a chat template that marks the turns of the assistant."""
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers
    from trl.data_utils import is_conversational

    if not is_conversational(next(iter(documents), {})):
        raise ValueError("train.assistant_only_loss=true needs conversations, in a column 'messages'")
    template = tokenizer.chat_template
    if template is None or options.train.get("chat_template_path") or has_generation_markers(template):
        return
    try:
        get_training_chat_template(tokenizer)
    except ValueError as error:
        raise ValueError(f"train.assistant_only_loss: {error}") from error


def hold_out(
    documents: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, options: RecipeOptions
) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """Split documents into those to train on and those to evaluate on.

    Held out are as many documents as the windows of the evaluation need, and a tenth of all at most, drawn by the seed.

    Returns:
        The documents of the training, and those of the evaluation; None if that is too little text, if perplexity is
        measured on another text or not at all, or if the built-in text is trained on, which has a part of its own.
    """
    spec = options.evaluation.spec
    if spec.windows == 0 or spec.text is not None or options.data.source == "builtin":
        return documents, None
    shuffled = documents.shuffle(seed=int(options.train.get("seed", 42)))
    held_out = as_needed(shuffled.select(range(len(shuffled) // 10)), tokenizer, options)
    tokens = sum(length_of(document, tokenizer, options) for document in held_out)
    if tokens >= options.evaluation_lengths[-1]:
        return shuffled.select(range(len(held_out), len(shuffled))), held_out
    warnings.warn(
        "perplexity is measured on text that ships with rope_patch: a tenth of the documents of "
        f"{options.data.source} is too little to be kept from training for it, and evaluation.text=PATH names "
        "another text",
        stacklevel=2,
    )
    return documents, None


def as_needed(
    documents: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, options: RecipeOptions
) -> datasets.Dataset:
    """Return the first documents, as many as the windows of the evaluation need."""
    needed = (options.evaluation.spec.windows or 16) * options.evaluation_lengths[-1]
    count = 0
    while needed > 0 and count < len(documents):
        needed -= length_of(documents[count], tokenizer, options)
        count += 1
    return documents.select(range(count))
