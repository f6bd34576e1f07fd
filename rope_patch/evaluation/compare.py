"""One model, several methods: perplexity by position and retrieval, on the same texts and prompts for all."""

from __future__ import annotations

import contextlib
import json
import math
import platform
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from rope_patch import __version__
from rope_patch.checkpoints.gguf import weights_in_file
from rope_patch.evaluation.effective_length import EffectiveLengths, effective_lengths
from rope_patch.evaluation.metrics import METRICS, Metric, PairedDifference, Span, column_heading, spans_of
from rope_patch.evaluation.suite import EvalResult, EvalSuite, as_suite, unpatched_missing
from rope_patch.methods import Default, Method, MethodLike
from rope_patch.modeling.scoring import name_of
from rope_patch.options.evaluation import EvalSpec
from rope_patch.patching.install import for_target, patched
from rope_patch.patching.locate import locate
from rope_patch.patching.verify import inspect_model, trained_length
from rope_patch.runtime import progress
from rope_patch.runtime.finished import finite, open_cache
from rope_patch.tables import RotaryTable

SCHEMA = 4


@dataclass(frozen=True)
class Row:
    """A method's scores.

    Attributes:
        method: as a method string.
        scores: perplexity and retrieval.
        tables: the rotary tables it used, by layer type.
        trained: whether the weights were trained under the method first.
    """

    method: str
    scores: EvalResult
    tables: tuple[RotaryTable, ...]
    trained: bool = False

    @property
    def label(self) -> str:
        """What the row is called in a comparison, where a method may have a trained row and an untrained one."""
        return labelled(self.method, self.trained)


def labelled(method: str, trained: bool) -> str:
    """Return what the row of a method is called.

    >>> labelled("yarn:factor=2", trained=True)
    'yarn:factor=2 after training'
    """
    return f"{method} after training" if trained else method


@dataclass(frozen=True)
class Column:
    """One metric of every method.

    Attributes:
        metric: its name, a key of :data:`~rope_patch.evaluation.metrics.METRICS`.
        span: what it is measured over.
        values: of each row.
        best: the row with the best value; the first of equals.
        winner: the method whose lead over every other one excludes zero; None when there is none.
        differences: of every other method from the best, by the label of its row, in the unit of the metric.
    """

    metric: str
    span: Span
    values: tuple[float, ...]
    best: int
    winner: str | None
    differences: dict[str, PairedDifference]

    @property
    def heading(self) -> str:
        """Head of the column in a printed table."""
        return column_heading(METRICS[self.metric], self.span)

    def to_dict(self) -> dict[str, Any]:
        """Return the column as JSON values."""
        values: dict[str, Any] = finite(asdict(self))
        values |= values.pop("span")
        return values


@dataclass(frozen=True)
class Comparison:
    """The scores of every method, and what they were measured on.

    Attributes:
        rows: one per method, in the order given.
        spec: what was measured.
        trained_length: of the model, as :func:`~rope_patch.patching.verify.trained_length` returns it [tokens].
        text: SHA-256 of the held-out text.
        text_name: what it is.
        python_version: whose files the built-in texts are made of; None for texts of the user's.
        confidence: that none of a column's intervals misses its difference (Bonferroni over all pairs of methods).
        model: class and name of the checkpoint.
        environment: versions, device, data type.
        schema: version of this layout.
    """

    rows: tuple[Row, ...]
    spec: EvalSpec
    trained_length: int
    text: str
    text_name: str
    python_version: str | None
    confidence: float = 0.95
    model: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def lengths(self) -> Sequence[int]:
        """Prompt lengths, rising [tokens]."""
        return self.spec.lengths

    def best(self) -> Row:
        """Return the row with the most exact matches at the longest length; perplexity there decides between equals."""
        longest = self.spec.longest

        def rank(row: Row) -> tuple[float, float]:
            answered = [result.accuracy(longest) for result in row.scores.retrieval.values()]
            text = row.scores.perplexity
            return math.fsum(answered) / len(answered), -text.buckets[-1].nll if text else 0.0

        return max(self.rows, key=rank)

    @property
    def warnings(self) -> list[str]:
        """What to know before reading the scores, as sentences."""
        if "patch before" in self.environment:
            return []
        unpatched = [row.scores for row in self.rows if row.method == "default"]
        sentences = [sentence for scores in unpatched for sentence in scores.warnings(self.trained_length)]
        if not unpatched:
            sentences = unpatched_missing([row.scores for row in self.rows], self.trained_length)
        return sentences + [
            f"{row.label}: perplexity at positions up to {row.scores.short_window} is of windows of that length, "
            "under the short table; at later ones it is of the whole windows, under the long table"
            for row in self.rows
            if row.scores.short_window
        ]

    def columns(self) -> list[Column]:
        """Return the table, metric by metric, with the differences that are significant."""
        return [self._column(metric, span) for metric in METRICS.values() for span in spans_of(metric, self.spec)]

    def effective_lengths(self) -> EffectiveLengths | None:
        """Return up to which length each method does as well as the unpatched model at its trained length.

        None where the unpatched model (``"default"``) was not measured, or not within its trained length.
        """
        if "patch before" in self.environment:
            return None
        return effective_lengths({row.label: row.scores for row in self.rows}, self.trained_length, self.confidence)

    def difference(self, method: str, other: str, metric: str, span: Span) -> PairedDifference:
        """Return how one method differs from another in one metric, at this comparison's plain confidence.

        Args:
            method: the label of its row.
            other: that of the one it is compared with.
            metric: key of :data:`~rope_patch.evaluation.metrics.METRICS`.
            span: positions of the text between two edges of buckets, or prompts of a task.
        """
        rows = {row.label: row.scores for row in self.rows}
        return METRICS.find(metric).difference(rows[method], rows[other], span, self.confidence)

    def _column(self, metric: Metric, span: Span) -> Column:
        values = [metric.value(row.scores, span) for row in self.rows]
        best = (min if metric.lower_is_better else max)(range(len(values)), key=values.__getitem__)
        # Each so wide that those of all pairs hold together: the best was chosen by what was measured.
        each = 1 - (1 - self.confidence) / max(1, math.comb(len(self.rows), 2))
        differences = {
            row.label: metric.difference(row.scores, self.rows[best].scores, span, each)
            for i, row in enumerate(self.rows)
            if i != best
        }
        wins = bool(differences) and all(difference.significant for difference in differences.values())
        return Column(metric.name, span, tuple(values), best, self.rows[best].label if wins else None, differences)

    def to_json(self) -> str:
        """Return everything as JSON."""
        rows = [
            {
                "method": row.label,
                **({"trained": True} if row.trained else {}),
                **row.scores.to_dict(),
                "tables": [
                    {
                        "layer_type": table.layer_type,
                        "inv_freq": table.inv_freq.tolist(),
                        "attention_scaling": table.attention_scaling,
                    }
                    for table in row.tables
                ],
            }
            for row in self.rows
        ]
        head: dict[str, Any] = {name: getattr(self, name) for name in ("schema", "model", "lengths")}
        head |= {"spec": self.spec.to_dict(), "spec_sha256": self.spec.sha256, "seed": self.spec.seed}
        names = ("trained_length", "text", "text_name", "python_version", "confidence", "environment")
        head |= {name: getattr(self, name) for name in names}
        head |= {"warnings": self.warnings, "columns": [column.to_dict() for column in self.columns()]}
        effective = self.effective_lengths()
        head["effective_lengths"] = None if effective is None else asdict(effective)
        return json.dumps({**head, "rows": rows}, indent=1, allow_nan=False)


def compare(
    model: nn.Module,
    tokenizer: Any,
    methods: Sequence[MethodLike],
    spec: EvalSpec | EvalSuite,
    *,
    layer_types: Sequence[str] | None = None,
    freeze_at: int | None = None,
    resume: str | Path | MutableMapping[str, Any] | None = None,
) -> Comparison:
    """Measure each method on a model, zero-shot or after training; the model is as it was at the end.

    All methods read the same windows and prompts, so their differences are paired.

    Args:
        model: a causal language model; an adapter on it is measured under every method. One that is patched already
            is measured as it is under ``"default"``, and every other method replaces its patch.
        tokenizer: its tokenizer.
        methods: what to compare; ``"default"`` is the model as it is. A factor that is left out is taken from the
            longest length.
        spec: what is measured, or a suite of it with texts in memory. The key tokens of LongPPL are chosen by the
            unpatched model, unless the suite's are chosen already.
        layer_types: which tables are patched; as :func:`rope_patch.apply` chooses by default.
        freeze_at: length at which a dynamic table is frozen before anything else [tokens].
        resume: file (or mapping) in which finished windows and haystacks are kept: after Ctrl-C or a crash the same
            call goes on where it was.

    Raises:
        ValueError: a bad method or task, too little text: before anything is measured.

    Example:
        ``compare(model, tokenizer, ["default", "yarn"], EvalSpec(lengths=[4096, 16384]))``
    """
    if isinstance(methods, str) or not methods:
        raise ValueError(f"methods must be a list of one or more methods, got {methods!r}")
    shared: dict[str, Any] = {"layer_types": layer_types, "freeze_at": freeze_at}
    suite = as_suite(spec, tokenizer)
    resolved = [for_target(model, method, suite.spec.longest, **shared) for method in methods]
    names = [str(method) for method in resolved]
    if len(set(names)) < len(names):
        raise ValueError(f"methods must differ from each other, got {', '.join(names)}")
    record = locate(model).record
    for method in resolved:  # a method that does not fit this model fails before the first is measured
        with under(model, method, record is not None, shared):
            pass
    result_cache = open_cache(resume)
    if suite.spec.longppl and suite.key_tokens is None:
        with named("LongPPL"):
            suite.choose_key_tokens(model, resume=result_cache, **shared)
    rows = []
    for name, method in zip(names, resolved, strict=True):
        with under(model, method, record is not None, shared) as tables, named(name), progress.stage(name):
            rows.append(Row(name, suite.run(model, resume=result_cache), tables))
    return Comparison(
        rows=tuple(rows),
        spec=suite.spec,
        trained_length=trained_length(model),
        text=suite.text_sha256,
        text_name=suite.text_name,
        python_version=suite.python_version,
        model=f"{type(model).__name__} {name_of(model)}".strip(),
        environment=environment(model) | ({"patch before": str(record.to_method())} if record is not None else {}),
    )


def environment(model: nn.Module) -> dict[str, str]:
    """Return versions, device and data type of a measurement, and what the weights of a GGUF file were in it."""
    parameter = next(model.parameters())
    return {
        "rope_patch": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(parameter.device) if parameter.is_cuda else str(parameter.device),
        "dtype": _precision(model, str(parameter.dtype).removeprefix("torch.")),
        **weights_in_file(model),
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


def _precision(model: Any, dtype: str) -> str:
    config: Any = getattr(model.config, "quantization_config", None)
    if config is None:
        return dtype
    config_values = config if isinstance(config, dict) else config.to_dict()
    bits = next((f"{n} bits" for n in (4, 8) if config_values.get(f"load_in_{n}bit")), "")
    return f"{config_values.get('quant_method', 'quantized')} {bits}, computed in {dtype}".replace(" ,", ",")
