"""Text of an analysis that its tables and figures share: layer groups, facts, names of heads, visible tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rope_patch.analysis.heads import LayerHeads
from rope_patch.analysis.result import Analysis
from rope_patch.frequencies import offset_frequency_bound, unrotated, wavelength
from rope_patch.modeling.sources import layers_text
from rope_patch.modeling.statistics import Capture, LayerCapture
from rope_patch.theory.tables import text


@dataclass(frozen=True)
class Kind:
    """Layers that share one table and one context.

    Attributes:
        name: empty where all layers are of one kind.
        layers: of it.
    """

    name: str
    layers: tuple[LayerCapture, ...]

    @property
    def inv_freq(self) -> Tensor:
        """Table of these layers: (pairs,) [rad/token]."""
        return self.layers[0].inv_freq

    @property
    def context(self) -> int:
        """Distances of their bounds [tokens]."""
        return self.layers[0].context

    @property
    def rows(self) -> list[str]:
        """Their indices as text."""
        return [str(layer.index) for layer in self.layers]

    def titled(self, names: Sequence[str]) -> list[str]:
        """Return titles of a row of panels; the first one says of which layers it is, where there are several kinds."""
        first, *others = names
        return [f"{self.name}\n{first}" if self.name else first, *others]

    def of(self, what: str) -> str:
        """Return something of these layers, in a sentence."""
        return f"{what} of {self.name}" if self.name else what


def kinds(capture: Capture) -> list[Kind]:
    """Return the layers grouped by table and context: those of a group share an axis of wavelengths and a bound."""
    groups: dict[tuple[object, ...], list[LayerCapture]] = {}
    for layer in capture.layers:
        groups.setdefault((layer.context, layer.query.mean.shape[1], *layer.inv_freq.tolist()), []).append(layer)
    kinds_found = []
    for layers in groups.values():
        types = list(dict.fromkeys(layer.layer_type for layer in layers if layer.layer_type))
        label = (
            " and ".join(types) or f"layers {layers_text([layer.index for layer in layers])}",
            f"{layers[0].context} tokens",
        )
        kinds_found.append(Kind(", ".join(label) if len(groups) > 1 else "", tuple(layers)))
    return kinds_found


def stacked(rows: Sequence[Tensor]) -> Tensor:
    """Return vectors as rows of one matrix, nan behind the shorter ones."""
    out = torch.full((len(rows), max(len(row) for row in rows)), math.nan, dtype=torch.float64)
    for line, row in zip(out, rows, strict=True):
        line[: len(row)] = row
    return out


# --- facts -----------------------------------------------------------------------------------------------------------


def facts(analysis: Analysis) -> list[tuple[str, str]]:
    """Return the facts above the report: checkpoint, text, versions."""
    statistics, rows = analysis.capture, analysis.rows
    groups = ", ".join(f"{name} ({rows.groups.count(name)})" for name in statistics.groups)
    chunk = f", read {statistics.chunk} tokens at a time" if statistics.chunk else ""
    entries = [
        ("Model", f"{analysis.name}, {statistics.model}"),
        ("Rotary table", analysis.table),
        ("Patch", analysis.method or "none"),
        ("Context", f"{analysis.context} tokens, as stated in the config"),
    ]
    entries += [(f"Layers, {kind.name}" if kind.name else "Layers", _kind(kind)) for kind in kinds(statistics)]
    no_p = "none of the measured values" if analysis.p_sweep else "the p sweep was left out"
    return [
        *entries,
        ("Text", f"{rows.name}; SHA-256 {rows.sha256[:16]}…; token ids {statistics.text}"),
        (
            "Rows",
            f"{statistics.rows} of {statistics.tokens // statistics.rows} tokens, {statistics.tokens} in all{chunk}",
        ),
        ("Rows of each group", groups),
        ("Advised p", no_p if analysis.advice.p is None else f"{analysis.advice.p:g}, see below"),
        ("Environment", ", ".join(f"{name} {version}" for name, version in analysis.environment.items())),
    ]


def _kind(kind: Kind) -> str:
    layer = kind.layers[0]
    partial = int((kind.inv_freq.double() < offset_frequency_bound(kind.context)).sum())
    zeroed = unrotated(kind.inv_freq)
    waves = wavelength(kind.inv_freq.double())[~zeroed]
    turning = (
        f"wavelengths {text(float(waves.min()))} to {text(float(waves.max()))} tokens"
        if len(waves)
        else "no pair rotates"
    )
    bare_features = layer.query.mean.shape[1] - 2 * layer.query.pairs
    rest = f"; {bare_features} features of a head belong to no pair" if bare_features else ""
    return (
        f"{layers_text([layer.index for layer in kind.layers])}; {layer.query.heads} query heads over "
        f"{layer.key.heads} key heads; {layer.query.pairs} pairs, {turning}, {partial} of them without a full turn "
        f"within {kind.context} tokens ({int(zeroed.sum())} unrotated){rest}"
    )


# --- names -----------------------------------------------------------------------------------------------------------


def all_heads(analysis: Analysis) -> list[tuple[LayerHeads, int]]:
    """Return every layer and query head."""
    return [(layer, head) for layer in analysis.heads.layers for head in range(layer.heads)]


def named(layer: int, head: int) -> str:
    """Name of a head."""
    return f"{layer}.{head}"


def spans_of(analysis: Analysis) -> list[str]:
    """Return the positions that perplexity was measured at, as text."""
    edges = analysis.p_sweep_positions
    return [f"positions {low}–{high}" for low, high in itertools.pairwise(edges)]


def relative(change: float) -> float:
    """Return the relative rise of perplexity of a rise of loss [nats/token]."""
    return math.expm1(change) if change < 700 else math.inf


def visible(token: str) -> str:
    r"""Return text with invisible characters shown: a space as ␣, a new line as \n.

    >>> visible(" the\n"), visible("\u200b"), visible("")
    ('␣the\\n', '\\u200b', '(empty)')
    """
    plain = {" ": "␣", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
    shown = (plain.get(sign) or (sign if sign.isprintable() else f"\\u{ord(sign):04x}") for sign in token)
    return "".join(shown) or "(empty)"


def token_text(analysis: Analysis, token: int) -> str:
    """Return the text of a token with invisible characters shown; with its id where it is part of a character."""
    shown = visible(analysis.token_text(token))
    return f"{shown} (id {token})" if "\N{REPLACEMENT CHARACTER}" in shown else shown
