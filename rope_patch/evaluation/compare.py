"""One model, several methods: perplexity by position and retrieval, on the same texts and prompts for all."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import platform
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import nn

from rope_patch import __version__
from rope_patch.evaluation.documents import Source, spread_windows
from rope_patch.evaluation.intervals import independent_count, paired_means, paired_shares
from rope_patch.evaluation.journal import Journal, finite
from rope_patch.evaluation.perplexity import PerplexityResult, perplexity
from rope_patch.evaluation.prompts import TASKS, Haystack, PromptMaker
from rope_patch.evaluation.retrieval import RetrievalResult, check_asked, retrieval
from rope_patch.evaluation.text import Corpus, builtin_text
from rope_patch.methods import Default, Method, MethodLike
from rope_patch.patching.apply import patched
from rope_patch.patching.locate import find_rotary
from rope_patch.patching.targets import for_target
from rope_patch.patching.verify import inspect_model
from rope_patch.tables import RotaryTable

SCHEMA = 2


@dataclass(frozen=True)
class Row:
    """A method's scores.

    Attributes:
        method: in the grammar.
        perplexity: over held-out text.
        retrieval: over lengths × depths.
        slots: the tables it used, by layer type.
    """

    method: str
    perplexity: PerplexityResult
    retrieval: RetrievalResult
    slots: tuple[RotaryTable, ...]


@dataclass(frozen=True)
class Difference:
    """How a method differs from the best one of a column, on the same documents or prompts.

    Attributes:
        method: in the grammar.
        estimate: its score minus the best one's; in nats/token for perplexity, a share for retrieval.
        low: lower end of the interval of the difference.
        high: upper end.
    """

    method: str
    estimate: float
    low: float
    high: float

    @property
    def separate(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Column:
    """One score of every method.

    Attributes:
        kind: ``"perplexity"`` or ``"retrieval"``.
        start: first position of the perplexity [tokens]; None for retrieval.
        stop: one past the last; the prompt length of retrieval [tokens].
        values: of each row.
        best: the row with the best value; the first of equals.
        winner: the method whose lead over every other one excludes zero; None when there is none.
        differences: of every other method from the best.
    """

    kind: Literal["perplexity", "retrieval"]
    start: int | None
    stop: int
    values: tuple[float, ...]
    best: int
    winner: str | None
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class Comparison:
    """The scores of every method, and what they were measured on.

    Attributes:
        rows: one per method, in the order given.
        lengths: prompt lengths of the retrieval task [tokens].
        trained_length: the context the model's config states [tokens].
        text: SHA-256 of the held-out text.
        text_name: what it is.
        python_version: whose files the built-in texts are made of; None for texts of the user's.
        seed: of the prompts.
        confidence: that none of a column's intervals misses its difference (Bonferroni over all pairs of methods).
        model: class and name of the checkpoint.
        environment: versions, device, data type.
        schema: version of this layout.
    """

    rows: tuple[Row, ...]
    lengths: tuple[int, ...]
    trained_length: int
    text: str
    text_name: str
    python_version: str | None
    seed: int
    confidence: float = 0.95
    model: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA

    def best(self) -> Row:
        """Return the row with the best retrieval at the longest length; perplexity there decides between equals."""
        longest = max(self.lengths)
        return max(self.rows, key=lambda row: (row.retrieval.accuracy(longest), -row.perplexity.buckets[-1].nll))

    def columns(self) -> list[Column]:
        """Return the table: perplexity between the lengths, then retrieval at each, with what can be told apart."""
        edges = [0, *sorted(self.lengths)]
        made = [self._column("perplexity", start, stop) for start, stop in itertools.pairwise(edges)]
        return [*made, *(self._column("retrieval", None, length) for length in sorted(self.lengths))]

    def difference(self, method: str, other: str, kind: str, stop: int, start: int = 0) -> Difference:
        """Return how one method differs from another in one score, at this comparison's plain confidence.

        Args:
            method: in the grammar.
            other: the one it is compared with.
            kind: ``"perplexity"`` between positions ``start`` and ``stop``, or ``"retrieval"`` at length ``stop``.
            stop: as in :class:`Column`.
            start: as in :class:`Column`.

        Raises:
            ValueError: an unknown method or column.
        """
        rows = {row.method: row for row in self.rows}
        for name in (method, other):
            if name not in rows:
                raise ValueError(f"no method {name!r} in this comparison. Known: {', '.join(rows)}")
        return difference(rows[method], rows[other], kind, start, stop, self.confidence)

    def _column(self, kind: Literal["perplexity", "retrieval"], start: int | None, stop: int) -> Column:
        if kind == "perplexity":
            values = [row.perplexity.between(start or 0, stop) for row in self.rows]
            best = min(range(len(values)), key=values.__getitem__)
        else:
            values = [row.retrieval.accuracy(stop) for row in self.rows]
            best = max(range(len(values)), key=values.__getitem__)
        others = [row for i, row in enumerate(self.rows) if i != best]
        # Each so wide that those of all pairs hold together: the best was chosen by what was measured.
        each = 1 - (1 - self.confidence) / max(1, math.comb(len(self.rows), 2))
        found = tuple(difference(row, self.rows[best], kind, start or 0, stop, each) for row in others)
        wins = bool(found) and all(difference.separate for difference in found)
        return Column(kind, start, stop, tuple(values), best, self.rows[best].method if wins else None, found)

    def to_json(self) -> str:
        """Return everything as JSON."""
        rows = [
            {
                "method": row.method,
                "perplexity": asdict(row.perplexity),
                "retrieval": asdict(row.retrieval),
                "tables": [
                    {
                        "layer_type": slot.layer_type,
                        "inv_freq": slot.inv_freq.tolist(),
                        "attention_scaling": slot.attention_scaling,
                    }
                    for slot in row.slots
                ],
            }
            for row in self.rows
        ]
        head = {
            name: getattr(self, name)
            for name in (
                *("schema", "model", "lengths", "trained_length", "text", "text_name", "python_version", "seed"),
                *("confidence", "environment"),
            )
        }
        columns = [finite(asdict(column)) for column in self.columns()]
        return json.dumps({**head, "columns": columns, "rows": rows}, indent=1, allow_nan=False)


def difference(row: Row, other: Row, kind: str, start: int, stop: int, confidence: float) -> Difference:
    """Return how one row differs from another that was measured on the same windows and prompts.

    Args:
        row: whose score counts as more.
        other: the one it is compared with.
        kind: ``"perplexity"`` between positions ``start`` and ``stop``, or ``"retrieval"`` at length ``stop``.
        start: as in :class:`Column`.
        stop: as in :class:`Column`.
        confidence: of the interval.
    """
    if kind == "retrieval":
        ours = [sample.correct for sample in row.retrieval.samples(stop)]
        theirs = [sample.correct for sample in other.retrieval.samples(stop)]
        estimate = (sum(ours) - sum(theirs)) / len(ours)
        count = _independent(row.retrieval, other.retrieval, stop)
        return Difference(row.method, estimate, *paired_shares(ours, theirs, confidence, count=count))
    if kind != "perplexity":
        raise ValueError(f"kind must be 'perplexity' or 'retrieval', got {kind!r}")
    a, b = (_by_window(r.perplexity, start, stop) for r in (row, other))
    estimate = math.fsum(a) / len(a) - math.fsum(b) / len(b)
    return Difference(row.method, estimate, *paired_means(a, b, confidence))


def _independent(one: RetrievalResult, other: RetrievalResult, length: int) -> float:
    """How many independent answers those at a length are worth: the ones of a haystack may hang together."""
    pairs = [
        [a.correct - b.correct for a, b in zip(mine.samples, theirs.samples, strict=True)]
        for mine, theirs in zip(one.cells, other.cells, strict=True)
        if mine.length == length
    ]
    haystacks = list(zip(*pairs, strict=True))
    return float(len(haystacks)) if TASKS[one.task].joined else independent_count(haystacks)


def _by_window(result: PerplexityResult, start: int, stop: int) -> list[float]:
    inside = result.inside(start, stop)
    return [sum(d.nll[i] for i in inside) / sum(d.tokens[i] for i in inside) for d in result.documents]


def compare(
    model: nn.Module,
    tokenizer: Any,
    methods: Sequence[MethodLike],
    *,
    lengths: Sequence[int],
    windows: int | None = None,
    bucket: int | None = None,
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    samples: int = 4,
    seed: int = 0,
    task: str = "passkey",
    mode: str = "single",
    text: Source | None = None,
    haystack: str | Path | Haystack = "builtin",
    chunk: int | None = None,
    batch_tokens: int = 16384,
    layer_types: Sequence[str] | None = None,
    freeze_at: int | None = None,
    resume: str | Path | MutableMapping[str, Any] | None = None,
    progress: Callable[[str, int], None] = lambda name, tokens: None,
) -> Comparison:
    """Measure each method on a model, zero-shot or after training; the model is as it was at the end.

    All methods read the same windows and prompts, so their differences are paired.

    Args:
        model: a causal language model; an adapter on it is measured under every method. One that is patched already
            is measured as it is under ``"default"``, and every other method replaces its patch.
        tokenizer: its tokenizer.
        methods: what to compare; ``"default"`` is the model as it is. A factor that is left out is taken from the
            longest length.
        lengths: prompt lengths of the retrieval task; perplexity is measured over windows of the longest [tokens].
        windows: windows of text, spread evenly over it; by default 16, or as many as it has room for.
        bucket: width of the position buckets [tokens]; by default a sixteenth of the longest length.
        depths: of the needle.
        samples: haystacks per length; each is asked at every depth.
        seed: of keys and haystacks.
        task: as in :func:`~rope_patch.evaluation.retrieval.retrieval`.
        mode: as in :func:`~rope_patch.evaluation.retrieval.retrieval`.
        text: for perplexity, as in :func:`~rope_patch.evaluation.documents.documents`; by default the built-in
            held-out split.
        haystack: as in :func:`~rope_patch.evaluation.retrieval.retrieval`.
        chunk: tokens per forward pass; whole windows and prompts by default.
        batch_tokens: tokens read side by side, at most.
        layer_types: which tables are patched; as :func:`rope_patch.apply` chooses by default.
        freeze_at: length at which a dynamic table is frozen before anything else [tokens].
        resume: file (or mapping) in which finished windows and haystacks are kept: after Ctrl-C or a crash the same
            call goes on where it was.
        progress: told the method and the tokens it has just read.

    Raises:
        ValueError: a bad method, task or length, too little text: before anything is measured.
    """
    if not methods or not lengths:
        raise ValueError("give at least one method and one length")
    shared: dict[str, Any] = {"layer_types": layer_types, "freeze_at": freeze_at}
    wanted = [for_target(model, method, max(lengths), **shared) for method in methods]
    names = [str(method) for method in wanted]
    if len(set(names)) < len(names):
        raise ValueError(f"methods must differ from each other, got {', '.join(names)}")
    lengths, depths = check_asked(task, mode, lengths, depths, samples, chunk)
    lengths = sorted(lengths)
    if lengths[0] < 2:
        raise ValueError(f"lengths must be at least 2 tokens, got {lengths[0]}")
    bucket = max(2, lengths[-1] // 16) if bucket is None else bucket
    if bucket < 1 or (windows is not None and windows < 1) or batch_tokens < 1:
        raise ValueError(f"windows, bucket and batch_tokens must be >= 1, got {windows}, {bucket} and {batch_tokens}")
    source = builtin_text("heldout") if text is None else text
    texts, digest = spread_windows(tokenizer, source, lengths[-1], windows)
    maker = PromptMaker(tokenizer, haystack)
    for length in lengths:
        maker.prompts(task, length, depths, mode=mode, seed=seed)
    edges = sorted({*range(0, lengths[-1], bucket), *lengths, 0} - {1})
    found_patch = find_rotary(model).record
    for method in wanted:  # a method that does not fit this model fails before the first is measured
        with under(model, method, found_patch is not None, shared):
            pass
    kept = Journal(resume) if isinstance(resume, str | Path) else resume
    rows = []
    for method in wanted:
        told = functools.partial(progress, str(method))
        with under(model, method, found_patch is not None, shared) as slots, named(str(method)):
            score = perplexity(
                model,
                texts,
                window=lengths[-1],
                buckets=edges,
                chunk=chunk if chunk is None else min(chunk, lengths[-1]),
                batch=max(1, batch_tokens // lengths[-1]) if chunk is None else 1,
                resume=kept,
                progress=told,
            )
            found = retrieval(
                model,
                tokenizer,
                task,
                mode=mode,
                lengths=lengths,
                depths=depths,
                samples=samples,
                seed=seed,
                haystack=maker,
                chunk=chunk,
                batch_tokens=batch_tokens,
                resume=kept,
                progress=told,
            )
            rows.append(Row(str(method), score, found, slots))
    name = str(getattr(model.config, "name_or_path", "") or "").rstrip("/").rpartition("/")[2]
    return Comparison(
        rows=tuple(rows),
        lengths=tuple(lengths),
        trained_length=inspect_model(model).tables[0].max_position_embeddings,
        text=digest,
        text_name=_name(source),
        python_version=source.python_version if isinstance(source, Corpus) else maker.haystack.python_version,
        seed=seed,
        model=f"{type(model).__name__} {name}".strip(),
        environment=environment(model)
        | ({"patch before": str(found_patch.to_method())} if found_patch is not None else {}),
    )


def environment(model: nn.Module) -> dict[str, str]:
    """Return versions, device and data type of a measurement."""
    parameter = next(model.parameters())
    return {
        "rope_patch": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(parameter.device) if parameter.is_cuda else str(parameter.device),
        "dtype": _precision(model, str(parameter.dtype).removeprefix("torch.")),
    }


@contextlib.contextmanager
def under(model: nn.Module, method: Method, again: bool, options: dict[str, Any]) -> Iterator[tuple[RotaryTable, ...]]:
    """Measure under a method; gives the tables in use."""
    if again and isinstance(method, Default):
        yield inspect_model(model).tables
        return
    with patched(model, method, replace=again, **options) as patch:
        yield tuple(patch.after.values())


@contextlib.contextmanager
def named(method: str) -> Iterator[None]:
    """Say which method a measurement failed under."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{method}: {error}") from error


def tokens_to_read(methods: int, lengths: Sequence[int], windows: int, depths: int, samples: int) -> int:
    """Return the tokens that :func:`compare` reports through ``progress``, for a task of one prompt per depth."""
    return methods * (windows * max(lengths) + depths * samples * sum(lengths))


def _precision(model: Any, dtype: str) -> str:
    wanted: Any = getattr(model.config, "quantization_config", None)
    if wanted is None:
        return dtype
    said = wanted if isinstance(wanted, dict) else wanted.to_dict()
    bits = next((f"{n} bits" for n in (4, 8) if said.get(f"load_in_{n}bit")), "")
    return f"{said.get('quant_method', 'quantized')} {bits}, computed in {dtype}".replace(" ,", ",")


def _name(source: Source) -> str:
    match source:
        case Corpus():
            return f"built-in {source.split} text"
        case Path():
            return source.name
    return "text of the user's own"
