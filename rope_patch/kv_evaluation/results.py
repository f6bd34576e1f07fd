"""What :func:`rope_patch.kv_evaluation.run.kv_check` found: all rows, what to do, and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor

from rope_patch.evaluation.metrics import Metric, PairedDifference, Span, spans_at
from rope_patch.evaluation.suite import EvalResult, unpatched_missing
from rope_patch.kv_cache.schemes import FORMATS
from rope_patch.kv_evaluation.attribution import longest_keys
from rope_patch.kv_evaluation.captions import counted
from rope_patch.kv_evaluation.verdicts import CheckRow, Verdict, change, find_verdict
from rope_patch.modeling.statistics import Capture
from rope_patch.options.evaluation import EvalSpec
from rope_patch.options.kv_check import Limits
from rope_patch.patching.record import key_of
from rope_patch.runtime.finished import finite

SCHEMA = 4


@dataclass(frozen=True, eq=False)
class KVCheck:
    """The result of a cache check.

    Attributes:
        model: name.
        rows: by method, full precision first.
        spec: what was measured.
        windows: of text, each as long as the longest length; they do not overlap.
        text: name.
        digest: SHA-256 of the text.
        calibration: tokens that mean keys were taken over [tokens]; 0 without centring.
        compared: windows whose distributions, radii and outliers were taken.
        attributed: windows on which each layer of unsafe schemes was measured alone; 0 where that was left out.
        trained_length: of the model, as :func:`~rope_patch.patching.verify.trained_length` returns it [tokens].
        limits: what a safe scheme may cost.
        captures: statistics under each method, on which radii and outliers rest.
        environment: versions, device, data type.
        loaded: the patch that the model came with, as a method string: what ``default`` means; None without one.
    """

    model: str
    rows: tuple[CheckRow, ...]
    spec: EvalSpec
    windows: int
    text: str
    digest: str
    calibration: int
    compared: int
    attributed: int
    trained_length: int
    limits: Limits
    captures: Mapping[str, Capture]
    environment: Mapping[str, str]
    loaded: str | None = None
    schema: int = SCHEMA

    @property
    def lengths(self) -> Sequence[int]:
        """Prompt lengths, rising [tokens]."""
        return self.spec.lengths

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods, in order."""
        return tuple(dict.fromkeys(row.method for row in self.rows))

    @property
    def tables(self) -> dict[str, dict[str, str]]:
        """Fingerprints of the tables under each method, by layer type (``"all"`` on unmixed models)."""
        tables = {method: self.of(method)[0].tables for method in self.methods}
        return {
            method: {key_of(table.layer_type): table.fingerprint for table in own} for method, own in tables.items()
        }

    @property
    def warnings(self) -> list[str]:
        """What to know before reading the scores, as sentences."""
        if self.loaded is not None:
            return []
        full = {method: self.of(method)[0].scores for method in self.methods}
        if "default" not in full:
            return unpatched_missing(list(full.values()), self.trained_length)
        return full["default"].warnings(self.trained_length)

    def meant(self, method: str) -> str:
        """Return a method as text; ``default`` with the patch that the model was loaded with."""
        return f"{method}: {self.loaded}, as loaded" if method == "default" and self.loaded else method

    def of(self, method: str) -> tuple[CheckRow, ...]:
        """Return the rows of a method, full precision first."""
        return tuple(row for row in self.rows if row.method == method)

    def named_scores(self) -> list[tuple[str, EvalResult]]:
        """Return the scores of every row, each with its method and its scheme as text."""
        return [
            (f"{row.method}: {'full precision' if row.divergence is None else row.scheme}", row.scores)
            for method in self.methods
            for row in self.of(method)
        ]

    def change(self, row: CheckRow, length: int, metric: str = "perplexity") -> PairedDifference:
        """Return what a scheme changes, with its interval: nats/token, or a share of prompts.

        Args:
            row: of this check.
            length: positions below it, or prompts of it [tokens].
            metric: key of :data:`~rope_patch.evaluation.metrics.METRICS`.
        """
        return change(row, self.of(row.method)[0], length, metric, self.limits.confidence)

    def detectable_loss(self, length: int, task: str | None = None) -> float:
        """Return the share of prompts of a length that a scheme may lose before its interval says so.

        It is what the interval of no difference reaches: with few prompts, safe and undecided rest on perplexity.

        Args:
            length: of the prompts [tokens].
            task: by default the first one of the spec.
        """
        base = self.rows[0]
        return change(base, base, length, "retrieval", self.limits.confidence, task).high

    def prompts(self, length: int) -> list[str]:
        """Return for each task how many prompts of a length there are, and which loss they could not show."""
        base, several = self.rows[0].scores, len(self.spec.tasks) > 1
        return [
            f"{counted(len(base.retrieval[task].samples(length)), 'prompt')} of {length} tokens in "
            f"{counted(len(base.retrieval[task].haystacks(length)), 'haystack')}"
            f"{f' ({task})' if several else ''}: a loss below {self.detectable_loss(length, task):.0%} could not be "
            "told apart from chance"
            for task in self.spec.tasks
        ]

    def verdict(self, row: CheckRow, length: int) -> Verdict:
        """Return whether a scheme is safe at a length, and where its cost comes from if not."""
        capture = self.captures.get(row.method)
        base = self.of(row.method)[0]
        return find_verdict(row, base, length, self.limits, longest_keys(capture) if capture else {})

    def idle(self, row: CheckRow, length: int) -> bool:
        """Return whether a scheme rounds nothing of a cache of a length, such as one that its residual window holds."""
        return row.divergence is not None and row.cache_bits[length] == FORMATS["none"]

    def summary(self) -> list[str]:
        """Return what to do: what is safe everywhere, then a sentence per method and length."""
        sentences = self._everywhere()
        for method in self.methods:
            for length in self.lengths:
                verdicts = [(row, self.verdict(row, length)) for row in self.of(method)[1:]]
                parts = [self._unsafe(row, verdict) for row, verdict in verdicts if verdict.kind == "unsafe"]
                idle = [
                    row.scheme for row, verdict in verdicts if verdict.kind == "undecided" and self.idle(row, length)
                ]
                for kind in ("safe", "undecided"):
                    names = [row.scheme for row, verdict in verdicts if verdict.kind == kind and row.scheme not in idle]
                    if names:
                        parts.append(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {kind}")
                if idle:
                    parts.append(
                        f"{', '.join(idle)} {'rounds' if len(idle) == 1 else 'round'} nothing at {length} tokens"
                    )
                if not any(answered(self.of(method)[0], length)):
                    parts.append("full precision answers no prompt, so retrieval tells nothing here")
                sentences.append(f"{method} at {length} tokens: {'; '.join(parts)}.")
        return sentences

    def _everywhere(self) -> list[str]:
        """Say what is safe under every method at every length, where there are several."""
        if len(self.methods) * len(self.lengths) == 1:
            return []
        kinds: dict[str, set[str]] = {}
        for row in self.rows:
            if row.divergence is not None:
                verdicts = kinds.setdefault(row.scheme, set())
                verdicts |= {self.verdict(row, length).kind for length in self.lengths}
        names = [name for name, verdicts in kinds.items() if verdicts == {"safe"}]
        words = (("under every method", self.methods), ("at every length", self.lengths))
        every = " ".join(word for word, many in words if len(many) > 1)
        return [f"Safe {every}: {', '.join(names) or 'none of the schemes asked for'}."]

    def _unsafe(self, row: CheckRow, verdict: Verdict) -> str:
        """Say where the cost of an unsafe scheme comes from."""
        return f"{row.scheme} is unsafe ({self._harm(row, verdict.length)}; {verdict.explanation})"

    def _harm(self, row: CheckRow, length: int) -> str:
        """Say what was measured: perplexity, and every metric that says that the scheme is unsafe."""
        base, parts = self.of(row.method)[0], []
        for metric, span in spans_at(self.spec, length):
            moved = metric.difference(row.scores, base.scores, span, self.limits.confidence)
            if metric.name == "perplexity" or metric.verdict(moved, self.limits.tolerance) == "unsafe":
                parts.append(f"{metric.label(self.spec, span)} {metric.estimate_text(moved)}")
        return ", ".join(parts)

    def _metrics(self, length: int) -> list[tuple[str, Metric, Span]]:
        """Every metric at a length by the name of its columns, which holds the task where there are several."""
        several = len(self.spec.tasks) > 1
        return [
            (f"{metric.name}_{span.task}" if several and span.task else metric.name, metric, span)
            for metric, span in spans_at(self.spec, length)
        ]

    def to_json(self) -> str:
        """Return everything as JSON, but the captures; errors of pairs are rms over heads."""
        names = ("schema", "model", "windows", "text", "digest", "calibration", "compared", "attributed")
        out = {name: getattr(self, name) for name in (*names, "trained_length")} | asdict(self.limits)
        out["chat_sha256"] = next(iter(self.rows[0].scores.retrieval.values())).chat_sha256
        out |= {"spec": self.spec.to_dict(), "spec_sha256": self.spec.sha256, "simulated": True, "stride": None}
        out |= {"summary": self.summary(), "environment": dict(self.environment)}
        out["methods"] = {
            method: {"patch": self.loaded if method == "default" else method, "tables": tables}
            for method, tables in self.tables.items()
        }
        out["rows"] = [self._row(row) for method in self.methods for row in self.of(method)]
        return json.dumps(finite(out), indent=1, allow_nan=False, ensure_ascii=False)

    def _row(self, row: CheckRow) -> dict[str, Any]:
        document: dict[str, Any] = {name: getattr(row, name) for name in ("method", "scheme", "scheme_text")}
        document |= {name: getattr(row, name) for name in ("key_bits", "value_bits", "bits")}
        document["divergence"] = asdict(row.divergence) if row.divergence else None
        document["lengths"] = {}
        base = self.of(row.method)[0]
        for length in self.lengths:
            entry: dict[str, Any] = {
                "cache_bits": row.cache_bits[length],
                "prompts": sum(1 for _ in answered(row, length)),
            }
            for name, metric, span in self._metrics(length):
                entry[name] = metric.value(row.scores, span)
                if row.divergence is not None:
                    change = metric.difference(row.scores, base.scores, span, self.limits.confidence)
                    entry[f"{metric.difference_name or name}_change"] = change
            if row.divergence is not None:
                entry["verdict"] = asdict(self.verdict(row, length))
            document["lengths"][str(length)] = entry
        document["errors"] = [
            {item.name: _numbers(item.name, getattr(error, item.name)) for item in fields(error)}
            for error in row.errors
        ]
        return document


def answered(row: CheckRow, length: int) -> list[bool]:
    """Return which prompts of a length were answered, of all tasks."""
    return [sample.correct for result in row.scores.retrieval.values() for sample in result.samples(length)]


def _numbers(name: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (value.square().mean(0).sqrt() if name == "pair" else value).tolist()
