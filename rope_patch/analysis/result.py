"""The result of :func:`rope_patch.analyze`, its main findings as sentences, and its JSON."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from rope_patch.analysis.heads import Heads
from rope_patch.analysis.outliers import (
    OUTLIER_RATIO,
    RADII,
    KeyBias,
    MeanPair,
    bias_sentences,
    contributions,
    mean_pairs,
    once_per_key_head,
    outlier_sentence,
    recall,
)
from rope_patch.analysis.p_sweep import SweepPoint
from rope_patch.analysis.single_heads import SingleHead
from rope_patch.modeling.state_statistics import Capture, write_npz
from rope_patch.runtime.captions import count_text, names_text, ranges_text
from rope_patch.runtime.result_cache import finite
from rope_patch.texts.domains import TextRows

SCHEMA = 9
LIGHT_SHARE = 0.05
"""Share of the logits below which pairs may be stopped, as far as their norms tell."""
LEAST_PEAK = 4.0
"""Ratio of the largest feature of keys to the mean norm of a pair above which one scale for a key rounds the others by
a quarter of its levels or more."""
NEAR, MOST_DISTANCES = 1024, 8192
"""What a pair adds to a logit is saved at each distance below the first, and at about as many beyond as the second."""


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
        single_heads: the heads that are shown in detail, on all of the text if they were asked for.
        p_sweep: what the pairs carry that p-RoPE would stop, at several p.
        biases: the pairs of biases that make outliers of its keys, the longest first.
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
    biases: tuple[KeyBias, ...]
    token_texts: Mapping[int, str]
    environment: Mapping[str, str]

    @cached_property
    def pairs(self) -> dict[str, tuple[MeanPair, ...]]:
        """Every pair of the mean ``"key"`` and ``"query"`` states, the longest first."""
        return {states: mean_pairs(self.capture, states) for states in ("key", "query")}

    def outliers(self, states: str = "key") -> tuple[MeanPair, ...]:
        """Return the outlier pairs of the keys or queries, the longest first."""
        return tuple(pair for pair in self.pairs[states] if pair.ratio > OUTLIER_RATIO)

    def recall(self, states: str) -> list[dict[str, float]]:
        """Return the recall of both bounds on the mean keys or queries, at the paper's radii and at ours."""
        pairs = self.pairs[states]
        radii = (*RADII, OUTLIER_RATIO * pairs[0].radius / pairs[0].ratio)
        return [recall([pair for pair in pairs if pair.radius > radius], radius) for radius in radii]

    def single_heads_to_npz(self, path: str | Path) -> None:
        """Write the states and logits of the single heads to one ``.npz``.

        Arrays have names such as ``head1.3.query``. Beside the fields of
        :class:`~rope_patch.analysis.single_heads.SingleHead` there are ``near_logits`` of each token, and ``added``,
        what each pair adds to the logit of the mean query and key at each of the ``distances``, up to twice the
        context, beyond 1024 tokens at an even step (pairs, distances).
        """
        heads = {f"head{head.layer}.{head.head}": head for head in self.single_heads}
        arrays = {}
        for name, head in heads.items():
            layer = self.capture.layer(head.layer)
            every = torch.arange(2 * layer.context)
            step = max(1, len(every) // MOST_DISTANCES)
            distances = torch.cat((every[:NEAR], every[NEAR::step]))
            arrays[f"{name}.near_logits"] = head.near_logits
            arrays[f"{name}.distances"] = distances
            arrays[f"{name}.added"] = contributions(layer, head.head, distances)
        write_npz(path, {"schema": SCHEMA}, "heads", heads, arrays)

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
            "biases": [asdict(bias) for bias in self.biases],
            "outliers": {states: [asdict(pair) for pair in self.outliers(states)] for states in ("key", "query")},
            "recall": {states: self.recall(states) for states in ("key", "query")},
            "p_sweep": [asdict(point) for point in self.p_sweep],
            "environment": dict(self.environment),
        }
        return json.dumps(finite(out), indent=1, allow_nan=False, ensure_ascii=False)


def findings(analysis: Analysis) -> list[str]:
    """Return the main findings, a sentence each: positional heads, outliers, what p-RoPE would stop, what to choose."""
    sentences = [_positional(analysis), *bias_sentences(analysis.biases)]
    sentences += [outlier_sentence(analysis.capture, pairs, states) for states, pairs in analysis.pairs.items()]
    if analysis.p_sweep:
        sentences.append(_stopped(analysis))
    return [*sentences, _what_to_choose(analysis)]


def _positional(analysis: Analysis) -> str:
    heads: dict[str, list[str]] = {}
    for layer in analysis.heads.layers:
        for head in range(layer.heads):
            for head_type in layer.head_types(head):
                heads.setdefault(head_type, []).append(f"{layer.index}.{head}")
    total = sum(layer.heads for layer in analysis.heads.layers)
    positional = analysis.heads.positional()
    parts = [f"{head_type}: {names_text(names, 8)}" for head_type, names in heads.items()]
    sentence = f"{len(positional)} of {total} heads are positional, with most of their attention at one distance."
    if parts:
        sentence += f" Heads by what they attend to, named by layer.head: {'; '.join(parts)}."
    if analysis.heads.others:
        others = count_text(len(analysis.heads.others), "layer")
        sentence += (
            f" {others} ({ranges_text(analysis.heads.others)}) without attention, or with one outside transformers’ "
            "AttentionInterface: left out."
        )
    return sentence


def _stopped(analysis: Analysis) -> str:
    point = next((point for point in analysis.p_sweep if point.p == 0.75), analysis.p_sweep[0])
    types = {layer.index: layer.layer_type or "all" for layer in analysis.capture.layers}
    keys = once_per_key_head(analysis.capture, analysis.outliers("key"))
    stopped = sum(pair.pair in point.stopped.get(types[pair.layer], ()) for pair in keys)
    return (
        f"p-RoPE at p = {point.p:g} would stop pairs {point}, with {100 * point.query_share:.0f} % of the queries’ "
        f"norm and {100 * point.key_share:.0f} % of the keys’, {stopped} of the {len(keys)} outliers of keys among "
        "them."
    )


def light_p(analysis: Analysis) -> float | None:
    """Return the smallest p that stops less than :data:`LIGHT_SHARE` of the logits; None if none does."""
    return min((point.p for point in analysis.p_sweep if point.logit_share < LIGHT_SHARE), default=None)


def _what_to_choose(analysis: Analysis) -> str:
    """Return what the findings say for p, the format of a cache and the layers, and what they cannot tell."""
    parts = []
    light = light_p(analysis)
    if light is not None:
        parts.append(f"by the norms p of {light:g}, the smallest that stops less than {LIGHT_SHARE:.0%} of the logits")
    elif analysis.p_sweep:
        parts.append(f"by the norms no p-RoPE: each p that was tried stops {LIGHT_SHARE:.0%} of the logits or more")
    # By falling p, up to the first that a head does not bear.
    sparing = list(itertools.takewhile(lambda point: point.kept == point.positional > 0, analysis.p_sweep))
    if sparing:
        last = sparing[-1]
        parts.append(f"by the positional heads p of {last.p:g} or more: all {last.positional} that were tried stay")
    layers = sorted({layer for layer, _ in analysis.heads.positional()})
    if layers:
        named = "layers" if len(layers) > 1 else "layer"
        parts.append(f"rotation in {named} {ranges_text(layers)} for the positional heads")
    peaks = [layer.key.largest.amax(1) / layer.key.mean_norm.mean(1) for layer in analysis.capture.layers]
    ratio = float(torch.cat(peaks).median())
    scale = "one scale for a whole key will do"
    if ratio > LEAST_PEAK:
        scale = "one scale for a whole key would round all other features coarsely, so take scales by block or channel"
    parts.append(
        f"a cache format for keys whose largest feature is {ratio:.0f} times the mean norm of a pair (median over "
        f"heads): {scale}"
    )
    return (
        f"What to choose: {'; '.join(parts)}. What that costs no statistic tells: rope-patch compare measures p, "
        "rope-patch kv-check formats."
    )


def _head_facts(analysis: Analysis, layer: int, head: int) -> dict[str, Any]:
    measured = analysis.heads.layer(layer)
    by_offset = ("offset_mass", "logit", "logit_spread", "logit_bound")
    names = ("key_mass", "first_mass", "sink_mass", "induction_mass", "distance", "entropy")
    return {
        "layer": layer,
        "head": head,
        "types": list(measured.head_types(head)),
        **{name: getattr(measured, name)[head].tolist() for name in by_offset},
        **{name: float(getattr(measured, name)[head]) for name in names},
    }
