"""Turns documents into rows of tokens: read with ``datasets``, packed once, the same for every process and restart.

A row has the columns that any Trainer hands to a model: ``input_ids``, ``labels`` and ``position_ids``, all of the
requested length, so that nothing is padded. Nothing predicts the first token of a row, so its label is ignored.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from rope_patch.modeling.positions import skipped_positions
from rope_patch.modeling.training_loss import IGNORED_LABEL
from rope_patch.options.finetune import DataOptions, RecipeOptions
from rope_patch.runtime.errors import read_json
from rope_patch.runtime.folders import write_atomically
from rope_patch.texts.builtin_text import builtin_text
from rope_patch.texts.documents import encode

READERS = {".txt": "text", ".md": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
"""Suffix of a file to the reader of ``datasets``."""

ROWS_FILE = "rows.arrow"
"""Name of the file of packed rows in the ``work`` folder of a run."""

HELD_OUT_FILE = "held_out.json"
"""Name of the file, beside the rows, of the texts that are kept from training."""

Document = tuple[list[int], list[int]]
"""The token ids of a document, and the labels that are learned, as many."""
DOCUMENTS_CHECKED = 1000
"""Number of documents that are searched for one as long as a row; if there is none among them, the run is refused."""


def open_source(options: DataOptions, seed: int) -> Any:
    """Return the documents as a ``datasets`` dataset, shuffled if asked; one from the hub is streamed.

    Args:
        options: the options of the data.
        seed: the seed of the order in which documents are read, if they are shuffled.

    Raises:
        FileNotFoundError: there is no such file, folder or dataset.
        ValueError: the folder holds files of several kinds or of none, or a file cannot be read.
    """
    import datasets
    from datasets.exceptions import DatasetGenerationError

    path = Path(options.source)
    if options.source == "builtin":
        dataset: Any = datasets.Dataset.from_dict({"text": list(builtin_text("train").documents)})
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
            dataset = datasets.load_dataset(kinds.pop(), data_files=[*map(str, files)], split="train", **arguments)
        except (DatasetGenerationError, StopIteration) as error:  # StopIteration: a JSON file is empty
            raise ValueError(f"data.source: cannot read {path}: {error.__cause__ or 'it is empty'}") from error
    else:
        dataset = datasets.load_dataset(options.source, options.config, split=options.split, streaming=True)
    if options.shuffle:
        return dataset.shuffle(seed=seed)
    return dataset


def text_files(source: str | Path) -> list[Path]:
    """Return the files of a source of documents: those of a folder, or the source itself, which may be no file."""
    path = Path(source)
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.suffix in READERS)
    return [path]


def conversation(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], learn: str) -> Document:
    """Return the tokens and labels of a conversation in the model's chat template.

    Args:
        tokenizer: the tokenizer of the model.
        messages: turns of ``role`` and ``content``, as transformers' ``apply_chat_template`` takes them.
        learn: ``"all"`` to learn every label, or ``"assistant"`` to learn those of the assistant's turns with the
            tokens that end each turn. A turn that opens the conversation is not learned, since the place where its
            rendering begins cannot be found.

    Raises:
        ValueError: there is no chat template, or it refuses these messages, or its rendering of a turn depends on later
            turns.
    """

    def render(count: int, ask: bool = False) -> list[int]:
        try:
            return list(tokenizer.apply_chat_template(messages[:count], add_generation_prompt=ask, return_dict=False))
        except TemplateError as error:
            raise ValueError(f"the chat template refuses a conversation: {error}") from error

    ids = render(len(messages))
    if learn == "all":
        return ids, ids
    labels = [IGNORED_LABEL] * len(ids)
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and i:
            # With the generation prompt, so that the words that open the assistant's turn are not learned.
            before = render(i, ask=True)
            after = render(i + 1)
            if ids[: len(after)] != after or after[: len(before)] != before:
                raise ValueError(
                    "this chat template renders earlier turns differently once later ones follow, or joins turns into "
                    "one token, so the assistant's tokens cannot be found: set data.learn=all"
                )
            labels[len(before) : len(after)] = after[len(before) :]
    return ids, labels


def held_out(options: RecipeOptions, tokenizer: PreTrainedTokenizerBase, folder: Path | None) -> list[str]:
    """Return texts of the user's data that are kept from training, so that perplexity is measured on the like of it.

    They are the first documents in the order of the seed, as many as the windows of the evaluation need, and a tenth of
    all at most. The list is empty if the user names a text, or if too few documents are there.

    Args:
        options: the options of the run.
        tokenizer: the tokenizer of the model.
        folder: the folder with the rows of a run that is resumed, which keeps its texts; None for a new run.
    """
    spec = options.evaluation.spec
    longest = options.evaluation_lengths[-1]
    if spec.windows == 0 or spec.text is not None or options.data.source == "builtin":
        return []
    if folder is not None:
        return list(read_json(folder / HELD_OUT_FILE)["texts"])
    documents = open_source(options.data, options.train.seed)
    most = DOCUMENTS_CHECKED
    if hasattr(documents, "__len__"):  # else it is streamed
        most = len(documents) // 10
    texts: list[str] = []
    tokens = 0
    for row in itertools.islice(documents, most):
        text = row.get(options.data.column)
        if isinstance(text, str) and text.strip():  # conversations are not read as text
            texts.append(text)
            tokens += sum(len(document.ids) for document in encode(tokenizer, [text], prefix=()))
        if tokens >= (spec.windows or 16) * longest:
            break
    if tokens >= longest:
        return texts
    warnings.warn(
        "perplexity is measured on text that ships with rope_patch: a tenth of the documents of "
        f"{options.data.source} is too little to be kept from training for it, and evaluation.text=PATH names another "
        "text",
        stacklevel=2,
    )
    return []


def read_documents(
    options: DataOptions, tokenizer: PreTrainedTokenizerBase, seed: int, without: Collection[str] = ()
) -> Iterator[Document]:
    """Yield the tokens and labels of every document that is not empty, nor among those that are held out.

    Raises:
        ValueError: there is no such column, it holds neither text nor messages, or it holds text under
            ``data.learn=assistant``.
    """
    for row in open_source(options, seed):
        if options.column not in row:
            raise ValueError(f"data.column: there is no column {options.column!r}. Known: {', '.join(row)}")
        value = row[options.column]
        if isinstance(value, str) and options.learn == "all":
            if not value.strip() or value in without:
                continue
            for document in encode(tokenizer, [value]):
                ids = document.ids.tolist()
                yield ids, ids
        elif isinstance(value, list) and all(isinstance(turn, dict) and "role" in turn for turn in value):
            if value:
                yield conversation(tokenizer, value, options.learn)
        else:
            expected = "text or lists of messages"
            if options.learn == "assistant":
                expected = "lists of messages"
            raise ValueError(f"data.column must hold {expected}, got {type(value).__name__}")


def pack(documents: Iterable[Document], length: int, *, apart: bool = False) -> Iterator[dict[str, list[int]]]:
    """Yield rows of ``length`` tokens that hold every token once, in order, until the documents end within a row.

    Args:
        documents: the tokens and labels of each document.
        length: the length of a row [tokens].
        apart: whether positions start at 0 in each document (and in the rest of one that begins in an earlier row),
            which keeps transformers' attention within the document. Otherwise tokens also attend to earlier documents
            of their row.
    """
    ids: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    for tokens, learned in documents:
        done = 0
        while done < len(tokens):
            part = slice(done, done + length - len(ids))
            start = 0 if apart else len(ids)
            labels += learned[part]
            if start == 0:
                # Nothing in view predicts this token: neither an earlier row nor, where they are kept apart, an earlier
                # document.
                labels[len(ids)] = IGNORED_LABEL
            ids += tokens[part]
            positions += range(start, start + len(tokens[part]))
            done = part.stop
            if len(ids) == length:
                yield {"input_ids": ids, "labels": labels, "position_ids": positions}
                ids = []
                labels = []
                positions = []


def make_rows(
    options: RecipeOptions, tokenizer: PreTrainedTokenizerBase, folder: Path, without: Sequence[str] = ()
) -> Any:
    """Pack the rows of a whole run into a file, or open that file: a resumed run reads the rows that it began with.

    Only as many documents are read as the run needs. If the data ends earlier, it is read again, in another order.

    Args:
        options: the options of the run.
        tokenizer: the tokenizer of the model.
        folder: the folder of the file; it holds the rows of this run alone.
        without: the texts that are kept from training.

    Returns:
        A ``datasets`` dataset of tensors.

    Raises:
        ValueError: no document is as long as a row, and ``data.allow_short`` is not set.
        OSError: the file is damaged.
    """
    import datasets
    from datasets.arrow_writer import ArrowWriter

    path = folder / ROWS_FILE
    count = options.train.steps * rows_per_step(options)
    if not path.exists():
        write_atomically(folder / HELD_OUT_FILE, json.dumps({"texts": [*without]}))
        tokens = datasets.List(datasets.Value("int32"))
        columns = ["input_ids", "labels", "position_ids"]
        if options.data.boundaries == "join":
            columns.append("attention_mask")
        features = datasets.Features(dict.fromkeys(columns, tokens))
        part = folder / f".{ROWS_FILE}"
        with ArrowWriter(features=features, path=str(part), writer_batch_size=64) as writer:
            for row in tqdm(itertools.islice(packed_rows(options, tokenizer, without), count), "packing", count):
                writer.write(row)
            writer.finalize()
        # Renamed when it is whole: a file that a kill cut short would be taken for all rows.
        os.replace(part, path)
    rows: Any = []
    with contextlib.suppress(OSError, ValueError):  # a file that was cut short may also give fewer rows
        rows = datasets.Dataset.from_file(str(path)).with_format("torch")
    if len(rows) != count:
        raise OSError(f"{path} is damaged: delete it, and the same command packs its {count} rows again")
    return rows


def rows_per_step(options: RecipeOptions) -> int:
    """Return the number of rows in a step, over all processes of the launcher.

    Processes that share a row (context or tensor parallelism) count as one.
    """
    # Read from the launcher's environment variables: a dry run and the packing need it before there is a Trainer.
    from accelerate.parallelism_config import ParallelismConfig

    readers: int = int(os.environ.get("WORLD_SIZE", 1)) // ParallelismConfig().non_data_parallel_size
    return options.train.batch * options.train.accumulate * max(1, readers)


def packed_rows(
    options: RecipeOptions, tokenizer: PreTrainedTokenizerBase, without: Sequence[str] = ()
) -> Iterator[dict[str, list[int]]]:
    """Yield the rows of a run, without end; the arguments are those of :func:`make_rows`.

    Raises:
        ValueError: no document is as long as a row, and ``data.allow_short`` is not set.
    """
    data = options.data
    seed = options.train.seed
    _check_documents(options, tokenizer)
    documents = _endless(options, tokenizer, frozenset(without))
    for index, row in enumerate(pack(documents, data.length, apart=data.boundaries == "apart")):
        if data.positions == "pose":
            # A seed for each row: its positions do not depend on the rows before it.
            rng = random.Random(f"{seed}/{index}")
            row["position_ids"] = skipped_positions(rng, data.length, options.target_length, data.chunks).tolist()
        # Without a mask transformers takes any position that is not one above the last for the start of another
        # document.
        if data.boundaries == "join":
            row["attention_mask"] = [1] * data.length
        yield row


def _endless(
    options: RecipeOptions, tokenizer: PreTrainedTokenizerBase, without: Collection[str]
) -> Iterator[Document]:
    """Yield the documents, and start over whenever they end."""
    for epoch in itertools.count():
        if epoch == 1:
            warnings.warn("the data ends before the run does: it is read again", stacklevel=2)
        yield from read_documents(options.data, tokenizer, options.train.seed + epoch, without)


def _check_documents(options: RecipeOptions, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse data in which no document is as long as a row, and so no two tokens are a row apart."""
    data = options.data
    lengths = []
    for ids, _ in itertools.islice(read_documents(data, tokenizer, options.train.seed), DOCUMENTS_CHECKED):
        lengths.append(len(ids))
        if data.allow_short or len(ids) >= data.length:
            return
    if not lengths:
        raise ValueError(f"data.source: {data.source} holds no text")
    raise ValueError(
        f"no document is as long as a row: the longest of {len(lengths)} read has {max(lengths)} tokens, a row has "
        f"{data.length}, so nothing could be learned about such distances. Give longer documents or a shorter "
        "data.length, or set data.allow_short=true to train on short documents joined into rows"
    )
