"""The result of :func:`rope_patch.kv_evaluation.kv_check.kv_check`: all rows, a summary, and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rope_patch.analysis.outliers import KeyBias, bias_sentences
from rope_patch.evaluation.intervals import CONFIDENCE
from rope_patch.evaluation.metrics import Metric, PairedDifference, Span, change_text, spans_at
from rope_patch.evaluation.suite import retrieval_warnings
from rope_patch.kv_evaluation.verdicts import CheckRow, Verdict, exceeds, verdict_of
from rope_patch.modeling.state_statistics import Capture
from rope_patch.options.evaluation import EvalSpec
from rope_patch.options.kv_check import Limits
from rope_patch.patching.record import key_of
from rope_patch.runtime.captions import names_text
from rope_patch.runtime.number_format import kl_text, number_text
from rope_patch.runtime.result_cache import finite

SCHEMA = 8


@dataclass(frozen=True, eq=False)
class KVCheck:
    """The result of a cache check.

    Attributes:
        model: the name of the model.
        rows: the rows of each method, full precision first.
        spec: the spec of what was measured.
        windows: number of windows of text that were read; they have the longest length, and do not overlap.
        text: the name of the text.
        digest: the SHA-256 of the text.
        trained_length: the length at which the model was trained, as
            :func:`~rope_patch.patching.verify.trained_length` returns it [tokens].
        limits: the limits of what a safe format may cost.
        captures: the statistics of queries and keys under each method.
        biases: the pairs of biases that make outliers of its keys, the longest first.
        environment: versions, device and data type.
        loaded: the patch that the model came with, which ``default`` stands for, as a method string; None without one.
    """

    model: str
    rows: tuple[CheckRow, ...]
    spec: EvalSpec
    windows: int
    text: str
    digest: str
    trained_length: int
    limits: Limits
    captures: Mapping[str, Capture]
    biases: tuple[KeyBias, ...]
    environment: Mapping[str, str]
    loaded: str | None = None

    @property
    def lengths(self) -> Sequence[int]:
        """Prompt lengths in rising order [tokens]."""
        return self.spec.lengths

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods, in order."""
        return tuple(dict.fromkeys(row.method for row in self.rows))

    @property
    def tables(self) -> dict[str, dict[str, str]]:
        """Fingerprints of the tables under each method, by layer type (``"all"`` on a model with one table)."""
        return {
            method: {key_of(table.layer_type): table.fingerprint for table in self.of(method)[0].tables}
            for method in self.methods
        }

    @property
    def warnings(self) -> list[str]:
        """Sentences that should be read before the scores."""
        # They compare with the unpatched model, which is not measured if the model came with a patch.
        if self.loaded is not None:
            return []
        full = {method: self.of(method)[0].scores for method in self.methods}
        return retrieval_warnings(full, "default", self.trained_length)

    def meant(self, method: str) -> str:
        """Return a method as text; ``default`` is followed by the patch that the model was loaded with."""
        if method == "default" and self.loaded:
            return f"{method}: {self.loaded}, as loaded"
        return method

    def of(self, method: str) -> tuple[CheckRow, ...]:
        """Return the rows of a method, full precision first."""
        return tuple(row for row in self.rows if row.method == method)

    def change(self, row: CheckRow, metric: Metric, span: Span) -> PairedDifference:
        """Return the change of a metric by a format, compared with full precision, with its interval."""
        return metric.difference(row.scores, self.of(row.method)[0].scores, span)

    def verdict(self, row: CheckRow, length: int) -> Verdict:
        """Return the verdict on the format of a row at a length."""
        return verdict_of(row, self.of(row.method)[0], length, self.limits)

    def summary(self) -> list[str]:
        """Return sentences on biases, and then for each method and length."""
        sentences = bias_sentences(self.biases)
        for method in self.methods:
            for length in self.lengths:
                base, *rows = self.of(method)
                verdicts = [(row, self.verdict(row, length)) for row in rows]
                parts = [
                    f"{row.format} is unsafe ({self._harm(row, length)})"
                    for row, verdict in verdicts
                    if verdict.kind == "unsafe"
                ]
                for kind, idle, one, many in (
                    ("safe", False, "is safe", "are safe"),
                    ("undecided", False, "is undecided", "are undecided"),
                    ("undecided", True, f"rounds nothing at {length} tokens", f"round nothing at {length} tokens"),
                ):
                    names = [row.format for row, verdict in verdicts if (verdict.kind, verdict.idle) == (kind, idle)]
                    if len(names) == 1:
                        parts.append(f"{names[0]} {one}")
                    elif names:
                        parts.append(f"{', '.join(names)} {many}")
                if self.spec.tasks and not any(answered(base, length)):
                    parts.append("full precision answers no prompt, so retrieval tells nothing here")
                workload = ", ".join(["text", *self.spec.tasks])
                at = f"{method} at"
                if self.methods == ("default",) and not self.loaded:
                    at = "At"
                sentences.append(f"{at} {length} tokens ({workload}): {'; '.join(parts)}.")
                if lost := list(filter(None, [self._lost(row, length) for row in rows])):
                    sentences.append(f"Of what full precision answers at {length} tokens {'; '.join(lost)}.")
        return sentences

    def advice(self) -> list[str]:
        """Return for each method which format to take, the smallest that is safe at every length, and what is open."""
        sentences = []
        for method in self.methods:
            at = "Take" if self.methods == ("default",) else f"{method}: take"
            rows = self.of(method)[1:]
            safe = [row for row in rows if all(self.verdict(row, length).kind == "safe" for length in self.lengths)]
            if not safe:
                sentences.append(
                    f"{at} full precision: no format is shown to be safe at every length. Formats with more bits, or "
                    "more windows and prompts, may change that."
                )
                continue
            longest = self.spec.longest
            best = min(safe, key=lambda row: (row.cache_bits[longest], row.divergences[longest].kl))
            bits = number_text(best.cache_bits[longest])
            kl = kl_text(best.divergences[longest].kl)
            sentence = f"{at} {best.format}, the smallest that is safe for what was asked: {bits} bits, KL {kl}."
            for metric, span in spans_at(self.spec, longest):
                if span.task:
                    _, low, high = (change_text(metric, value) for value in self.change(best, metric, span))
                    sentence += f" Of {span.task} only a change beyond {low} to {high} of the prompts is ruled out."
            sentences.append(sentence)
        return sentences

    def _lost(self, row: CheckRow, length: int) -> str:
        """Return how many prompts of each task a format loses of those that full precision answers; "" if none.

        Rounding also turns wrong answers into right ones: these are counted beside, so that noise is not taken for a
        loss.
        """
        lost = []
        for task in self.spec.tasks:
            before, after = (one.scores.retrieval[task].samples(length) for one in (self.of(row.method)[0], row))
            kept = [sample.correct for was, sample in zip(before, after, strict=True) if was.correct]
            if not all(kept):
                lost.append(f"{len(kept) - sum(kept)} of {len(kept)} {task}")
                gained = sum(sample.correct for sample in after) - sum(kept)
                if gained:
                    lost[-1] += f" (and answers {gained} of the {len(after) - len(kept)} others)"
        return f"{row.format} loses {names_text(lost)}" if lost else ""

    def _harm(self, row: CheckRow, length: int) -> str:
        """Return the change of perplexity, and everything else in which a format is unsafe, as text."""
        parts = []
        for metric, span in spans_at(self.spec, length):
            moved = self.change(row, metric, span)
            if metric.name == "perplexity" or metric.verdict(moved, self.limits.tolerance) == "unsafe":
                name = metric.name
                if span.task and len(self.spec.tasks) > 1:
                    name += f" of {span.task}"
                parts.append(f"{name} {change_text(metric, moved.estimate)}")
        divergence = row.divergences[length]
        if exceeds(divergence.kl, self.limits):
            parts.append(f"KL {kl_text(divergence.kl)}")
        if row.attribution is not None and row.attribution.remedies:
            best = row.attribution.remedies[0]
            parts.append(f"{kl_text(best.kl)} with {best.name}")
        return ", ".join(parts)

    def to_json(self) -> str:
        """Return everything but the captures as JSON."""
        names = ("model", "windows", "text", "digest", "trained_length")
        out = {"schema": SCHEMA} | {name: getattr(self, name) for name in names} | asdict(self.limits)
        # One for all tasks, and none without a task.
        out["chat_sha256"] = next((one.chat_sha256 for one in self.rows[0].scores.retrieval.values()), "")
        out |= {"spec": self.spec.to_dict(), "confidence": CONFIDENCE, "simulated": True, "stride": None}
        out |= {"summary": self.summary(), "environment": dict(self.environment)}
        out["biases"] = [asdict(bias) for bias in self.biases]
        out["methods"] = {
            method: {"patch": self.loaded if method == "default" else method, "tables": tables}
            for method, tables in self.tables.items()
        }
        out["rows"] = [self._row(row) for row in self.rows]
        return json.dumps(finite(out), indent=1, allow_nan=False, ensure_ascii=False)

    def _row(self, row: CheckRow) -> dict[str, Any]:
        names = ("method", "format", "format_text", "key_bits", "value_bits", "bits")
        document: dict[str, Any] = {name: getattr(row, name) for name in names}
        for name in ("divergence", "attribution"):
            part = getattr(row, name)
            document[name] = None if part is None else asdict(part)
        document["lengths"] = {str(length): self._entry(row, length) for length in self.lengths}
        return document

    def _entry(self, row: CheckRow, length: int) -> dict[str, Any]:
        """Return the measurements of a row at a length; if there are several tasks, metrics carry their names."""
        entry: dict[str, Any] = {"cache_bits": row.cache_bits[length], "prompts": len(answered(row, length))}
        for metric, span in spans_at(self.spec, length):
            task = ""
            if len(self.spec.tasks) > 1 and span.task:
                task = f"_{span.task}"
            entry[f"{metric.name}{task}"] = metric.value(row.scores, span)
            if row.divergence is not None:
                entry[f"{metric.difference_name}{task}_change"] = self.change(row, metric, span)
        if row.divergence is not None:
            entry["divergence"] = asdict(row.divergences[length])
            entry["verdict"] = asdict(self.verdict(row, length))
        return entry


def answered(row: CheckRow, length: int) -> list[bool]:
    """Return whether each prompt of a length was answered, of all tasks."""
    return [sample.correct for result in row.scores.retrieval.values() for sample in result.samples(length)]
