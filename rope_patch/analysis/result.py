"""The result of :func:`rope_patch.analyze`, its main findings as sentences, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rope_patch.analysis.heads import Heads
from rope_patch.analysis.outliers import OutlierPair, outlier_pairs
from rope_patch.analysis.p_sweep import SweepPoint
from rope_patch.analysis.single_heads import SingleHead
from rope_patch.evaluation.domains import TextRows
from rope_patch.modeling.state_statistics import Capture
from rope_patch.runtime.result_cache import finite

SCHEMA = 4


@dataclass(frozen=True, eq=False)
class Analysis:
    """How a checkpoint uses its rotary table on a text.

    Attributes:
        name: the name of the checkpoint.
        table: a description of its rotary tables, as the config and a patch state them.
        method: the patch in place as a method string, or None.
        context: the context length that the tables reach [tokens].
        rows: the rows of text that were read.
        capture: the statistics of queries, keys and values.
        heads: the attention masses and sinks of its heads.
        single_heads: the heads that are shown in detail, on a short text.
        p_sweep: what the pairs carry that p-RoPE would stop, at several p.
        token_texts: the text of each token id that the result mentions.
        environment: the versions, the device and the data type of the run.
    """

    name: str
    table: str
    method: str | None
    context: int
    rows: TextRows
    capture: Capture
    heads: Heads
    single_heads: tuple[SingleHead, ...]
    p_sweep: tuple[SweepPoint, ...]
    token_texts: Mapping[int, str]
    environment: Mapping[str, str]

    def token_text(self, token: int) -> str:
        """Return the text of a token id."""
        return self.token_texts.get(token, str(token))

    def outliers(self, states: str = "key") -> tuple[OutlierPair, ...]:
        """Return the outlier pairs of the keys or queries, the longest first."""
        return outlier_pairs(self.capture, states)

    def to_json(self) -> str:
        """Return everything but the arrays: types of heads, outliers and the p sweep."""
        out = {
            "schema": SCHEMA,
            "model": self.name,
            "class": self.capture.model,
            "table": self.table,
            "method": self.method,
            "context": self.context,
            "text": {
                "name": self.rows.name,
                "sha256": self.rows.sha256,
                "groups": list(dict.fromkeys(self.rows.groups)),
                "rows": self.capture.rows,
                "tokens": self.capture.tokens,
            },
            "findings": findings(self),
            "heads": [
                _head_facts(self, layer.index, head) for layer in self.heads.layers for head in range(layer.heads)
            ],
            "outliers": {states: [asdict(pair) for pair in self.outliers(states)] for states in ("key", "query")},
            "p_sweep": [asdict(point) for point in self.p_sweep],
            "environment": dict(self.environment),
        }
        return json.dumps(finite(out), indent=1, allow_nan=False, ensure_ascii=False)


def findings(analysis: Analysis) -> list[str]:
    """Return the main findings, a sentence each."""
    sentences = []
    heads = [
        (layer.index, head, layer.head_types(head)) for layer in analysis.heads.layers for head in range(layer.heads)
    ]
    total = len(heads)
    for head_type, what in (
        ("previous token", "attend to the previous token"),
        ("diagonal", "attend to their own token"),
        ("2 back", "attend two tokens back"),
        ("induction", "do induction, on the text or on repeated random tokens,"),
        ("first token", "attend to the first token"),
        ("sink", "attend to several sinks"),
    ):
        names = [f"{layer}.{head}" for layer, head, types in heads if head_type in types]
        if names:
            listed = ", ".join(names[:12])
            if len(names) > 12:
                listed += f" and {len(names) - 12} more"
            sentences.append(
                f"Heads that {what} with most of their attention: {len(names)} of {total} (layer.head {listed})."
            )
    if not any(types for _, _, types in heads):
        sentences.append(f"None of {total} heads is of a known type.")
    for states in ("key", "query"):
        pairs = analysis.outliers(states)
        # A key head counts once for each query head that it serves, as in `outlier_pairs`.
        count = sum(layer.query.heads * layer.query.pairs for layer in analysis.capture.layers)
        if not pairs:
            sentences.append(
                f"No mean {states} is an outlier: none of {count} pairs has a radius over 5 times the median of the "
                "layers read."
            )
            continue
        kinds = {kind: sum(pair.kind == kind for pair in pairs) for kind in ("offset feature", "partial turn")}
        below = sum(kinds.values()) + sum(pair.kind == "unrotated" for pair in pairs)
        sentences.append(
            f"{len(pairs)} of {count} mean {states} pairs are outliers, up to {pairs[0].ratio:.0f} times the median of "
            f"the layers read (layer {pairs[0].layer}, query head {pairs[0].head}, pair {pairs[0].pair}); {below} lie "
            f"below the frequency bound of Jonasson 2025, {kinds['offset feature']} of these beyond its angle bound."
        )
    return sentences


def _head_facts(analysis: Analysis, layer: int, head: int) -> dict[str, Any]:
    measured = analysis.heads.layer(layer)
    return {
        "layer": layer,
        "head": head,
        "types": list(measured.head_types(head)),
        "offset_mass": measured.offset_mass[head].tolist(),
        "first_mass": float(measured.first_mass[head]),
        "sink_mass": float(measured.sink_mass[head]),
        "induction_mass": float(measured.induction_mass[head]),
        "repeated_mass": float(measured.repeated_mass[head]),
        "distance": float(measured.distance[head]),
        "entropy": float(measured.entropy[head]),
    }
