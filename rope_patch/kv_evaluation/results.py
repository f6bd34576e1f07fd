"""What :func:`rope_patch.kv_evaluation.run.kv_check` found: all rows, what to do, and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor

from rope_patch.evaluation.result_cache import finite
from rope_patch.kv_cache.packed import PackedCache
from rope_patch.kv_cache.schemes import FORMATS, Scheme
from rope_patch.kv_evaluation.verdicts import CheckRow, Verdict, change, judge, longest_keys, percent, relative
from rope_patch.modeling.statistics import Capture
from rope_patch.patching.record import key_of

SCHEMA = 1


@dataclass(frozen=True, eq=False)
class KVCheck:
    """What a checkpoint's cache survives.

    Attributes:
        model: name.
        rows: by method, full precision first.
        lengths: [tokens].
        windows: of text, each as long as the longest length; they do not overlap.
        text: name.
        digest: SHA-256 of the text.
        calibration: tokens that mean keys were taken over [tokens]; 0 without centring.
        compared: windows whose distributions, radii and outliers were taken.
        context: distances of the frequency bound [tokens]; None for each layer's own.
        captures: statistics under each method, on which radii and outliers rest.
        tolerance: rise of perplexity that a safe scheme may cost, relative.
        confidence: of the intervals.
        environment: versions, device, data type.
        packed: transformers' own caches, packed, on one window in the model as it was given.
        loaded: the patch that the model came with, in the grammar, which is what ``default`` means; None without one.
    """

    model: str
    rows: tuple[CheckRow, ...]
    lengths: tuple[int, ...]
    windows: int
    text: str
    digest: str
    calibration: int
    compared: int
    context: int | None
    captures: Mapping[str, Capture]
    tolerance: float
    confidence: float
    environment: Mapping[str, str]
    packed: tuple[PackedCache, ...] = ()
    loaded: str | None = None
    schema: int = SCHEMA

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods, in order."""
        return tuple(dict.fromkeys(row.method for row in self.rows))

    @property
    def tables(self) -> dict[str, dict[str, str]]:
        """Fingerprints of the tables under each method, by layer type (``"all"`` on unmixed models)."""
        slots = {method: self.of(method)[0].scores.slots for method in self.methods}
        return {method: {key_of(slot.layer_type): slot.fingerprint for slot in own} for method, own in slots.items()}

    def meant(self, method: str) -> str:
        """Return a method in words: where it leaves the model as it came, with the patch that it came with."""
        return f"{method}: {self.loaded}, as loaded" if method == "default" and self.loaded else method

    def of(self, method: str) -> tuple[CheckRow, ...]:
        """Return the rows of a method: full precision first, each scheme with the mitigations tried for it behind."""
        rows = [row for row in self.rows if row.method == method]
        return tuple(
            item
            for row in rows
            if row.mitigation_of is None
            for item in (row, *(other for other in rows if other.mitigation_of == row.scheme))
        )

    def change(self, row: CheckRow, length: int, kind: str = "perplexity") -> tuple[float, float, float]:
        """Return what a scheme changes, with its interval: nats/token, or a share of prompts.

        Args:
            row: of this check.
            length: positions below it, or prompts of it [tokens].
            kind: ``"perplexity"`` or ``"retrieval"``.
        """
        return change(row, self.of(row.method)[0], length, kind, self.confidence)

    def blind(self, length: int) -> float:
        """Return the share of prompts of a length that a scheme may lose before its interval says so.

        It is what the interval of no difference reaches: with few prompts, safe and undecided rest on perplexity.
        """
        base = self.rows[0]
        return change(base, base, length, "retrieval", self.confidence)[2]

    def verdict(self, row: CheckRow, length: int) -> Verdict:
        """Return whether a scheme is safe at a length, and what is to blame if not."""
        seen = self.captures.get(row.method)
        base = self.of(row.method)[0]
        return judge(row, base, length, self.tolerance, self.confidence, longest_keys(seen) if seen else {})

    def idle(self, row: CheckRow, length: int) -> bool:
        """Return whether a scheme rounds nothing of a cache of a length, such as one that its residual window holds."""
        return row.divergence is not None and row.cache_bits[length] == FORMATS["none"]

    def mitigations(self, row: CheckRow, length: int) -> list[tuple[CheckRow, Verdict]]:
        """Return what was tried for a scheme, best first: safe ones by bits, then the others by perplexity.

        What rounds nothing at the length is no mitigation there.
        """
        others = [other for other in self.of(row.method) if other.mitigation_of == row.scheme]
        tried = [(other, self.verdict(other, length)) for other in others if not self.idle(other, length)]
        safe = sorted((item for item in tried if item[1].kind == "safe"), key=lambda item: item[0].cache_bits[length])
        rest = [item for item in tried if item[1].kind != "safe"]
        return [*safe, *sorted(rest, key=lambda item: self.change(item[0], length)[0])]

    def summary(self) -> list[str]:
        """Return what to do: what is safe everywhere, then a sentence per method and length."""
        made = self._everywhere()
        for method in self.methods:
            given = [row for row in self.of(method)[1:] if row.mitigation_of is None]
            for length in self.lengths:
                found = [(row, self.verdict(row, length)) for row in given]
                parts = [self._unsafe(row, verdict) for row, verdict in found if verdict.kind == "unsafe"]
                idle = [row.scheme for row, verdict in found if verdict.kind == "undecided" and self.idle(row, length)]
                for kind in ("safe", "undecided"):
                    names = [row.scheme for row, verdict in found if verdict.kind == kind and row.scheme not in idle]
                    if names:
                        parts.append(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {kind}")
                if idle:
                    parts.append(
                        f"{', '.join(idle)} {'rounds' if len(idle) == 1 else 'round'} nothing at {length} tokens"
                    )
                if not self.of(method)[0].scores.retrieval.accuracy(length):
                    parts.append("full precision answers no prompt, so retrieval tells nothing here")
                made.append(f"{method} at {length} tokens: {'; '.join(parts)}.")
        return made

    def _everywhere(self) -> list[str]:
        """Say what is safe under every method at every length, where there are several."""
        if len(self.methods) * len(self.lengths) == 1:
            return []
        kinds: dict[str, set[str]] = {}
        for row in self.rows:
            if row.divergence is not None and row.mitigation_of is None:
                found = kinds.setdefault(row.scheme, set())
                found |= {self.verdict(row, length).kind for length in self.lengths}
        names = [name for name, found in kinds.items() if found == {"safe"}]
        words = (("under every method", self.methods), ("at every length", self.lengths))
        every = " ".join(word for word, many in words if len(many) > 1)
        return [f"Safe {every}: {', '.join(names) or 'none of the schemes asked for'}."]

    def _unsafe(self, row: CheckRow, verdict: Verdict) -> str:
        """Say what is to blame for an unsafe scheme, and what helps."""
        tried = self.mitigations(row, verdict.length)
        text = f"{row.scheme} is unsafe ({self._harm(row, verdict.length)}; {verdict.cause}"
        if tried and tried[0][1].kind == "safe":
            text += f"; {_spelled(tried[0][0])} is safe"
        elif tried:
            best = tried[0][0]
            text += f"; no mitigation is surely safe, the best is {_spelled(best)}: {self._harm(best, verdict.length)}"
        return text + ")"

    def _harm(self, row: CheckRow, length: int) -> str:
        """Say what was measured, retrieval where it surely fell."""
        found, _, better = self.change(row, length, "retrieval")
        lost = f", retrieval {found:+.2f}" if better < 0 else ""
        return f"perplexity {percent(self.change(row, length)[0])}{lost}"

    def table(self) -> list[dict[str, Any]]:
        """Return a line per method, scheme and length: what was measured, as numbers; None where there is none."""
        made = []
        for row in (row for method in self.methods for row in self.of(method)):
            for length in self.lengths:
                line: dict[str, Any] = {
                    **{name: getattr(row, name) for name in ("method", "scheme")},
                    "text": row.scheme_text,
                    "mitigation_of": row.mitigation_of,
                    "length": length,
                    **{name: getattr(row, name) for name in ("key_bits", "value_bits", "bits")},
                    "cache_bits": row.cache_bits[length],
                    "perplexity": row.scores.perplexity.between(0, length),
                    "retrieval": row.scores.retrieval.accuracy(length),
                    "prompts": len(row.scores.retrieval.samples(length)),
                    **dict.fromkeys(_COMPARED),
                }
                if row.divergence is not None:
                    verdict = self.verdict(row, length)
                    changes = (*map(relative, self.change(row, length)), *self.change(row, length, "retrieval"))
                    told = (row.divergence.kl, row.divergence.top1, verdict.kind, verdict.layers, verdict.pairs)
                    line |= dict(zip(_COMPARED, (*changes, *told), strict=True))
                made.append(line)
        return made

    def to_json(self) -> str:
        """Return everything as JSON, but the captures; errors of pairs are rms over heads."""
        names = ("schema", "model", "lengths", "windows", "text", "digest", "calibration", "compared", "context")
        out = {name: getattr(self, name) for name in (*names, "tolerance", "confidence")}
        out |= {"simulated": True, "stride": None, "summary": self.summary(), "environment": dict(self.environment)}
        out["methods"] = {
            method: {"patch": self.loaded if method == "default" else method, "tables": tables}
            for method, tables in self.tables.items()
        }
        out["packed"] = [asdict(item) for item in self.packed]
        out["rows"] = [self._row(row) for method in self.methods for row in self.of(method)]
        return json.dumps(finite(out), indent=1, allow_nan=False, ensure_ascii=False)

    def _row(self, row: CheckRow) -> dict[str, Any]:
        scheme, asked = Scheme.parse(row.scheme_text), row.scores.retrieval
        made: dict[str, Any] = {name: getattr(row, name) for name in ("method", "scheme", "scheme_text", "mitigation_of")}
        made |= {"residual": scheme.residual, "sinks": scheme.sinks, "skip": scheme.skip}
        made |= {name: getattr(row, name) for name in ("key_bits", "value_bits", "bits", "prediction")}
        made |= {"task": asked.task, "seed": asked.seed, "chunk": row.scores.perplexity.chunk}
        made["divergence"] = asdict(row.divergence) if row.divergence else None
        made["lengths"] = {}
        for length in self.lengths:
            entry: dict[str, Any] = {
                "cache_bits": row.cache_bits[length],
                "perplexity": row.scores.perplexity.between(0, length),
                "retrieval": asked.accuracy(length),
                "prompts": len(asked.samples(length)),
            }
            if row.divergence is not None:
                entry["nll_change"] = self.change(row, length)
                entry["retrieval_change"] = self.change(row, length, "retrieval")
                entry["verdict"] = asdict(self.verdict(row, length))
            made["lengths"][str(length)] = entry
        made["errors"] = [
            {item.name: _numbers(item.name, getattr(error, item.name)) for item in fields(error)}
            for error in row.errors
        ]
        return made


_COMPARED = (
    *("perplexity_change", "perplexity_low", "perplexity_high"),
    *("retrieval_change", "retrieval_low", "retrieval_high"),
    *("kl", "top1", "verdict", "layers", "pairs"),
)


def _spelled(row: CheckRow) -> str:
    """A mitigation, whose name is no text, with its text."""
    return f"{row.scheme} ({row.scheme_text})"


def _numbers(name: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (value.square().mean(0).sqrt() if name == "pair" else value).tolist()
