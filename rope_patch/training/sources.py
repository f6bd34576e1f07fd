"""From a dataset to rows on disk: read with ``datasets``, packed once, the same for every process and restart."""

from __future__ import annotations

import itertools
import os
import random
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from rope_patch.evaluation.documents import TokenDocument, encode
from rope_patch.evaluation.haystack import Haystack
from rope_patch.evaluation.prompts import PromptMaker
from rope_patch.evaluation.tasks import TASKS
from rope_patch.evaluation.text import builtin_text
from rope_patch.options.finetune import DataOptions, RecipeOptions
from rope_patch.training.data import conversation, mix, pack

READERS = {".txt": "text", ".md": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
"""The reader of ``datasets`` for each kind of file."""

ROWS = "rows.arrow"
"""The packed rows, in the ``work`` folder of a run."""

DOCUMENTS_CHECKED = 1000
"""If none of so many documents is as long as a row, the run is refused without reading on."""

PROMPT_TEXT = 2_000_000
"""The most characters of training text that retrieval prompts use as haystack."""


def open_source(options: DataOptions, seed: int, epoch: int = 0) -> Any:
    """Return the documents as a ``datasets`` dataset, shuffled if asked.

    Args:
        options: of the data.
        seed: of the order.
        epoch: number of times the data has been read; each has an order of its own.

    Raises:
        FileNotFoundError: no such file or folder.
        ValueError: files of an unknown kind or of several kinds, a file that cannot be read, or a missing column.
    """
    import datasets
    from datasets.exceptions import DatasetGenerationError

    path = Path(options.source)
    if options.source == "builtin":
        dataset: Any = datasets.Dataset.from_dict({"text": list(builtin_text("train").documents)})
    elif path.exists():
        paths = _files(path)
        kinds = {READERS.get(p.suffix) for p in paths}
        if len(kinds) != 1 or None in kinds:
            suffixes = ", ".join(sorted({p.suffix or p.name for p in paths})) or "nothing"
            raise ValueError(f"{path} must hold files of one kind ({', '.join(READERS)}), found {suffixes}")
        arguments = {"sample_by": "document"} if kinds == {"text"} else {}
        try:
            dataset = datasets.load_dataset(
                kinds.pop(), data_files=[str(p) for p in paths], split="train", streaming=options.streaming, **arguments
            )
        except (DatasetGenerationError, StopIteration) as error:  # the second where there is nothing in a JSON file
            raise ValueError(f"data.source: cannot read {path}: {error.__cause__ or 'it is empty'}") from error
    elif path.is_absolute() or options.source.startswith((".", "~")) or path.suffix in READERS:
        raise FileNotFoundError(f"no file or folder {options.source!r}")
    else:
        dataset = datasets.load_dataset(
            options.source, options.config, split=options.split, streaming=options.streaming
        )
    columns = dataset.column_names or list(next(iter(dataset), {}))
    if options.column not in columns:
        raise ValueError(f"data.column: {options.source} has no column {options.column!r}. Known: {', '.join(columns)}")
    return dataset.shuffle(seed=seed + epoch) if options.shuffle else dataset


def _files(path: Path) -> list[Path]:
    """The files of a folder that can be read, in order; of a file, itself."""
    return sorted(p for p in path.rglob("*") if p.suffix in READERS and p.is_file()) if path.is_dir() else [path]


def token_documents(
    tokenizer: PreTrainedTokenizerBase, source: Iterable[Any], options: DataOptions
) -> Iterator[TokenDocument]:
    """Yield the documents of a dataset as tokens; lists of messages through the chat template.

    Raises:
        ValueError: neither text nor messages in the column, or text under ``data.learn=assistant``.
    """
    for number, row in enumerate(source):
        value = row[options.column]
        if isinstance(value, list) and all(isinstance(turn, dict) and "role" in turn for turn in value):
            if value:
                yield conversation(tokenizer, value, options.learn)
        elif isinstance(value, str):
            if options.learn == "assistant":
                raise ValueError("data.learn=assistant needs a column of messages, and this one holds plain text")
            if value.strip():
                yield from encode(tokenizer, [value])
        else:
            raise ValueError(f"data.column: row {number} holds neither text nor messages, but {type(value).__name__}")


class PackedRows(Dataset[list[dict[str, Any]]]):
    """Rows in items of equal tokens: one row of the longest length, or as many shorter ones as have its tokens.

    Args:
        rows: of a ``datasets`` dataset, in order.
        groups: number of rows of each item.
    """

    def __init__(self, rows: Any, groups: list[int]) -> None:
        self.rows = rows
        self.ends = [0, *itertools.accumulate(groups)]

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, item: int) -> list[dict[str, Any]]:
        item = range(len(self))[item]
        return [self.rows[i] for i in range(self.ends[item], self.ends[item + 1])]

    def tokens(self, items: int) -> int:
        """Return the number of tokens in the first items."""
        import pyarrow.compute as pc

        lengths = pc.list_value_length(self.rows.data["ids"].slice(0, self.ends[items]))
        return int(pc.sum(lengths).as_py() or 0)


def make_rows(
    options: RecipeOptions, tokenizer: PreTrainedTokenizerBase, folder: Path, *, processes: int = 1, quiet: bool = False
) -> PackedRows:
    """Pack the rows of a whole run into a file, or open the file, so that a resumed run reads the rows it began with.

    Only as many documents are read as the run needs. Data that ends earlier is read again, in another order.

    Args:
        options: the options of the run.
        tokenizer: the tokenizer of the model.
        folder: the folder of the file, which holds rows of this run alone.
        processes: the number of processes that train on rows of their own.
        quiet: whether to show no progress bar.

    Raises:
        ValueError: no document is as long as a row, and ``data.allow_short`` is not set.
    """
    import datasets
    from datasets.arrow_writer import ArrowWriter

    stages, path = plan_stages(options, processes), folder / ROWS
    if not path.exists():
        features = datasets.Features(
            ids=datasets.List(datasets.Value("int32")),
            index=datasets.Value("int64"),
            starts=datasets.List(datasets.Value("int32")),
            weights=datasets.List(datasets.Value("float32")),
        )
        part = folder / f".{ROWS}"
        total = sum(items * per for _, items, per in stages)
        with ArrowWriter(features=features, path=str(part), writer_batch_size=64) as writer:
            for row in tqdm(_all_rows(options, tokenizer, stages), "packing", total, unit="rows", disable=quiet):
                writer.write(row)
            writer.finalize()
        os.replace(part, path)
    groups = [per for _, items, per in stages for _ in range(items)]
    return PackedRows(datasets.Dataset.from_file(str(path)), groups)


def reading_processes() -> int:
    """Return how many processes train on rows of their own, as the launcher's environment says.

    Those that share a row (context parallel, Ulysses, tensor parallel) count as one.
    """
    from accelerate.parallelism_config import ParallelismConfig

    sharing: int = ParallelismConfig().non_data_parallel_size
    return max(1, int(os.environ.get("WORLD_SIZE", 1)) // sharing)


def plan_stages(options: RecipeOptions, processes: int = 1) -> list[tuple[int, int, int]]:
    """Return length of the rows [tokens], number of items, and rows per item, stage by stage."""
    per_step = options.train.batch * options.train.accumulate * processes
    longest = max(length for length, _ in options.stages)
    edges = [round(share * options.train.steps) for share in itertools.accumulate(s for _, s in options.stages)]
    stages = []
    for (length, _), low, high in zip(options.stages, [0, *edges], edges, strict=False):
        if high == low:
            raise ValueError(
                f"data.lengths: the stage of {length} tokens has less than one of the {options.train.steps} steps"
            )
        stages.append((length, (high - low) * per_step, longest // length))
    return stages


def _all_rows(
    options: RecipeOptions, tokenizer: PreTrainedTokenizerBase, stages: list[tuple[int, int, int]]
) -> Iterator[dict[str, Any]]:
    data, seed = options.data, options.train.seed
    documents = _Documents(options, tokenizer, max(length for length, *_ in stages))
    maker = _prompt_maker(options, tokenizer) if data.retrieval else None
    first = 0
    for length, items, per in stages:
        rows: Iterable[dict[str, Any]] = pack(documents, length, data.boundaries)
        if maker is not None:
            arguments = {"task": data.task, "answer_weight": data.answer_weight, "seed": seed, "first": first}
            rows = mix(rows, maker, data.retrieval, length, **arguments)  # type: ignore[arg-type]
        for number, row in enumerate(itertools.islice(rows, items * per), first):
            yield {**row, "index": number}
        first += items * per
    documents.check()


class _Documents:
    """The documents, again and again; each stage continues where the one before it stopped reading."""

    def __init__(self, options: RecipeOptions, tokenizer: PreTrainedTokenizerBase, longest: int) -> None:
        self.options, self.tokenizer, self.longest = options, tokenizer, longest
        self.count = self.longest_document = 0
        self.source = self._endless()

    def __iter__(self) -> Iterator[TokenDocument]:
        return self.source

    def _endless(self) -> Iterator[TokenDocument]:
        for epoch in itertools.count():
            before = self.count
            source = open_source(self.options.data, self.options.train.seed, epoch)
            for document in token_documents(self.tokenizer, source, self.options.data):
                if not len(document.ids):
                    continue
                self.count += 1
                self.longest_document = max(self.longest_document, len(document.ids))
                if self.count == DOCUMENTS_CHECKED:
                    self.check()
                yield document
            if self.count == before:
                raise ValueError(f"data.source: {self.options.data.source} holds no text")
            if epoch == 0:
                self.check()
                order = "another" if self.options.data.shuffle else "the same"
                warnings.warn(f"the data ends before the run does: it is read again, in {order} order", stacklevel=2)

    def check(self) -> None:
        """Refuse data without a document as long as a row, in which no two tokens are so far apart."""
        if self.longest_document < self.longest and self.count and not self.options.data.allow_short:
            raise ValueError(
                f"no document is as long as a row: the longest of {self.count} read has {self.longest_document} "
                f"tokens, a row has {self.longest}, so nothing could be learned about such distances. Give longer "
                "documents or shorter data.lengths, or set data.allow_short=true to train on short documents joined "
                "into rows"
            )


def _prompt_maker(options: RecipeOptions, tokenizer: PreTrainedTokenizerBase) -> PromptMaker:
    TASKS.find(options.data.task)
    texts, size = [], 0
    for row in open_source(options.data, options.train.seed):
        value = row[options.data.column]
        if not isinstance(value, str):
            raise ValueError("data.retrieval: prompts need plain text as haystack, and the data holds conversations")
        texts.append(value)
        size += len(value)
        if size > PROMPT_TEXT:
            break
    random.Random(options.train.seed).shuffle(texts)
    text = "\n\n".join(texts)
    if not text.strip():
        raise ValueError(f"data.source: {options.data.source} holds no text")
    return PromptMaker(tokenizer, Haystack(text, "training text"))
