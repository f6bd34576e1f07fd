"""Keys with bits of their own for each rotary pair: a quantizer, and rules that share out a budget of bits.

The quantizer and the rule ``energy`` are those of Block-GTQ (arXiv:2606.24033; ``block_gtq_pipeline.py``,
``allocator.py`` and ``freq_analysis.py`` of JIA-Lab-research/blockgtq at 3fe14e7). Pairs of a head that have equally
many bits form a group, whose features are divided by their norm, rotated if they have 3 bits or more, and rounded to
Lloyd-Max levels. Each head has the same budget, 1 to 8 bits a pair.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from rope_patch.analysis.outliers import outlier_pairs
from rope_patch.kv_cache.cache import CacheMaker, quantized
from rope_patch.kv_cache.plans import LayerPlan
from rope_patch.kv_cache.schemes import SCALE_BITS
from rope_patch.modeling.attention_layers import AttentionLayer, find_attention_layers, split_pairs
from rope_patch.modeling.capture import capture
from rope_patch.modeling.state_statistics import Capture
from rope_patch.patching.cache_argument import cache_argument

LEAST, MOST = 1, 8
ROTATED_FROM = 3
"""Number of bits from which a group is rotated."""

# --- rounding


def places(layer: AttentionLayer) -> Tensor:
    """Return the two features of each pair: (head_dim / 2, 2). Features outside the table follow, in halves."""
    features = torch.arange(layer.parts["key"].head_dim)
    inside, outside = features[: 2 * layer.table.pairs], features[2 * layer.table.pairs :]
    rotary = torch.stack(split_pairs(inside, layer.table.pairs, layer.interleaved), -1)
    return torch.cat([rotary, outside.view(2, -1).mT])


@functools.cache
def levels(bits: int, features: int) -> Tensor:
    """Return the levels of least squared error for a normal variable of variance ``1 / features``: (2 ** bits,).

    ``lloyd_max`` of the package has the levels of vLLM, which differ: these have two digits for 2 bits, and stop after
    the same number of rounds as Block-GTQ's.
    """
    if bits == 2:
        return torch.tensor([-1.51, -0.453, 0.453, 1.51], dtype=torch.float64).div(features**0.5).float()
    normal, count = torch.special.ndtr, 2**bits
    edges = torch.special.ndtri(torch.linspace(0, 1, count + 1, dtype=torch.float64))
    for _ in range(101):
        density = (-edges.square() / 2).exp() / (2 * torch.pi) ** 0.5
        centers = -density.diff() / normal(edges).diff()
        edges = torch.cat([edges[:1], (centers[1:] + centers[:-1]) / 2, edges[-1:]])
    return (centers / features**0.5).float()


@functools.cache
def rotation(features: int, seed: int) -> Tensor:
    """Return a random rotation matrix (features, features), float32, drawn as Block-GTQ draws it."""
    q, r = numpy.linalg.qr(numpy.random.default_rng(seed).standard_normal((features, features)))
    q = q * numpy.where(numpy.diag(r) < 0, -1.0, 1.0)
    if numpy.linalg.slogdet(q)[0] < 0:
        q[:, 0] = -q[:, 0]
    return torch.from_numpy(q).float()


def round_head(
    x: Tensor, bits: Tensor, of_pair: Tensor, rotated_from: int = ROTATED_FROM, scales: Tensor | None = None
) -> Tensor:
    """Return keys of one head as they are read back.

    Args:
        x: (..., head_dim) keys.
        bits: (pairs,) number of bits of each feature of a pair.
        of_pair: (pairs, 2) the features of each pair.
        rotated_from: number of bits from which a group is rotated.
        scales: (pairs,) factors by which features are divided first, the same for all keys; all groups then share the
            norm of the head. Without them each group has a norm of its own.
    """
    if scales is not None:
        spread = torch.empty(x.shape[-1])
        spread[of_pair] = scales.float()[:, None]
        x = x / spread
    out, order = torch.empty_like(x), bits.argsort()  # not stable, as in Block-GTQ: the rotation depends on the order
    for width in bits.unique().tolist():
        features = of_pair[order[bits[order] == width]].flatten()
        part = x[..., features].float()
        matrix = rotation(len(features), 42 + width) if width >= rotated_from else torch.eye(len(features))
        norm = (part if scales is None else x).norm(dim=-1, keepdim=True)
        table = levels(width, len(features) if scales is None else x.shape[-1])
        nearest = torch.searchsorted((table[1:] + table[:-1]) / 2, (part / norm.clamp_min(1e-30)) @ matrix.T)
        unit = table[nearest] if scales is not None else torch.nn.functional.normalize(table[nearest], dim=-1)
        out[..., features] = ((unit * norm) @ matrix).to(x.dtype)
    return out if scales is None else out * spread


@dataclass(frozen=True, eq=False)
class PairPlan(LayerPlan):
    """The plan of a layer whose keys have bits by pair.

    Attributes:
        bits: (heads, pairs) number of bits.
        rotated_from: number of bits from which a group is rotated.
        scales: (heads, pairs) factors of :func:`round_head`, if any.
    """

    bits: Tensor | None = None
    rotated_from: int = ROTATED_FROM
    scales: Tensor | None = None

    def _round(self, name: str, x: Tensor) -> Tensor:
        if name != "keys" or self.bits is None:
            return super()._round(name, x)
        of_pair, heads = places(self.layer), []
        for head, bits in enumerate(self.bits):
            scales = None if self.scales is None else self.scales[head]
            heads.append(round_head(x[:, head].float(), bits, of_pair, self.rotated_from, scales))
        return torch.stack(heads, 1).to(x.dtype)


@contextlib.contextmanager
def keys_by_pair(
    model: nn.Module,
    bits: Mapping[int, Tensor],
    *,
    rotated_from: int = ROTATED_FROM,
    scales: Mapping[int, Tensor] | None = None,
) -> Iterator[CacheMaker]:
    """Let a model read through a cache whose keys have bits by pair, for the length of a ``with`` block.

    Args:
        model: the model.
        bits: (heads, pairs) number of bits of each layer, by its index.
        rotated_from: number of bits from which a group is rotated.
        scales: (heads, pairs) factors of :func:`round_head` of each layer, by its index.
    """
    with quantized(model, "k=turboquant4;v=none") as maker:
        maker.run.plans = {
            index: PairPlan(
                **{field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)},
                bits=bits[plan.layer.keys_of],
                rotated_from=rotated_from,
                scales=None if scales is None else scales[plan.layer.keys_of],
            )
            for index, plan in maker.run.plans.items()
        }
        yield dataclasses.replace(maker, identity="pair bits")


# --- sharing out


class LayerEnergies(NamedTuple):
    """What a text tells about the pairs of one layer, by key head: (heads, pairs) each, float64.

    Attributes:
        query: mean squared norm of a pair of queries, over the query heads of a key head.
        key: mean squared norm of a pair of keys.
        gradient: mean squared norm of the derivative of the text's loss by a pair of a key.
    """

    query: Tensor
    key: Tensor
    gradient: Tensor


def measure_energies(model: Any, rows: Tensor) -> dict[int, LayerEnergies]:
    """Measure energies on (rows, tokens) token ids, each row forward and backward, by the index of the layer."""
    layers = find_attention_layers(model)
    seen: dict[tuple[int, str], Tensor] = {}
    sums: dict[tuple[int, str], Tensor] = {}

    def keep(layer: AttentionLayer, role: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            if not output.requires_grad:
                output.requires_grad_()
            seen[layer.index, role] = output

        return hook

    def add(layer: AttentionLayer, name: str, states: Tensor) -> None:
        energy = states[0].double()[..., places(layer)].square().sum(-1).mean(0)  # (heads, pairs)
        sums[layer.index, name] = sums.get((layer.index, name), torch.zeros(())) + energy / len(rows)

    with contextlib.ExitStack() as stack:
        for layer in layers:
            for role in ("query", "key"):
                stack.callback(layer.parts[role].module.register_forward_hook(keep(layer, role)).remove)
        for row in rows:
            logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
            loss = nn.functional.cross_entropy(logits.float(), row[1:], reduction="sum")
            keys = [seen[layer.index, "key"] for layer in layers]
            for layer, key, slope in zip(layers, keys, torch.autograd.grad(loss, keys), strict=True):
                add(layer, "query", layer.parts["query"].of(seen[layer.index, "query"].detach()))
                add(layer, "key", layer.parts["key"].of(key.detach()))
                add(layer, "gradient", layer.parts["key"].of(slope))
            seen.clear()
    energies = {}
    for layer in layers:
        query, key, gradient = (sums[layer.index, name] for name in LayerEnergies._fields)
        energies[layer.index] = LayerEnergies(query.view(len(key), -1, query.shape[-1]).mean(1), key, gradient)
    return energies


def greedy_bits(scores: Tensor, average: int) -> Tensor:
    """Give each next bit of a head to the pair whose score, divided by 4 for each bit that it has, is the highest.

    Args:
        scores: (heads, pairs) scores.
        average: mean number of bits of a pair.

    Returns:
        (heads, pairs) number of bits.
    """
    bits = torch.full(scores.shape, LEAST)
    for _ in range(scores.shape[1] * (average - LEAST)):
        gain = (scores * 0.25**bits).masked_fill(bits >= MOST, -1)
        bits.scatter_add_(1, gain.argmax(1, keepdim=True), torch.ones(len(bits), 1, dtype=bits.dtype))
    return bits


def equal_bits(model: nn.Module, count: int) -> dict[int, Tensor]:
    """Return the same number of bits for every pair: (heads, pairs) of each layer, by its index."""
    keys = {layer.index: layer.parts["key"] for layer in find_attention_layers(model)}
    return {index: torch.full((len(key.heads), key.head_dim // 2), count) for index, key in keys.items()}


def bits_by_loss(model: Any, rows: Tensor, average: int) -> dict[int, Tensor]:
    """Give each next bit of every head to the pair that lowers the loss most, tried one by one: an oracle, and slow.

    Args:
        model: the model.
        rows: (rows, tokens) token ids on which the loss is measured.
        average: mean number of bits of a pair.
    """

    @torch.no_grad()
    def loss(bits: Mapping[int, Tensor]) -> float:
        with keys_by_pair(model, bits) as maker:
            logits = model(input_ids=rows, **{cache_argument(model): maker()}).logits[:, :-1]
        return float(nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten()))

    bits = equal_bits(model, LEAST)
    while any(float(layer.double().mean()) < average for layer in bits.values()):
        chosen = []
        for index, layer in bits.items():
            for head in range(len(layer)):
                losses = {}
                for pair in (layer[head] < MOST).nonzero().flatten().tolist():
                    layer[head, pair] += 1
                    losses[pair] = loss(bits)
                    layer[head, pair] -= 1
                chosen.append((index, head, min(losses, key=losses.__getitem__)))
        for index, head, pair in chosen:
            bits[index][head, pair] += 1
    return bits


Scores = dict[int, Tensor]
"""(heads, pairs) scores of each layer, by its index."""


def uniform(energies: Mapping[int, LayerEnergies], statistics: Capture) -> Scores:
    """The same for all pairs."""
    return {index: torch.ones_like(layer.key) for index, layer in energies.items()}


def energy(energies: Mapping[int, LayerEnergies], statistics: Capture) -> Scores:
    """Block-GTQ: the mean of a pair's energy in queries and in keys."""
    return {index: (layer.query + layer.key) / 2 for index, layer in energies.items()}


def product(energies: Mapping[int, LayerEnergies], statistics: Capture) -> Scores:
    """The product of a pair's energy in queries and in keys, which bounds its part of the squared logit error."""
    return {index: layer.query * layer.key for index, layer in energies.items()}


def mean_key(energies: Mapping[int, LayerEnergies], statistics: Capture) -> Scores:
    """The squared product of the length of a pair's mean key and the mean norm of its queries."""
    scores = uniform(energies, statistics)
    for layer in statistics.layers:
        norms = layer.query.mean_norm.view(layer.key.heads, -1, layer.key.pairs).mean(1)
        scores[layer.index][:, : layer.key.pairs] = (layer.key.radius * norms).square()
        scores[layer.index][:, layer.key.pairs :] = 0
    return scores


def bound(energies: Mapping[int, LayerEnergies], statistics: Capture) -> Scores:
    """Outliers below Jonasson's frequency bound first, up to 8 bits, and equal bits for all others."""
    scores = uniform(energies, statistics)
    groups = {layer.index: layer.groups for layer in statistics.layers}
    for pair in outlier_pairs(statistics):
        if pair.kind != "full turns":
            scores[pair.layer][pair.head // groups[pair.layer], pair.pair] = 4.0**MOST
    return scores


def gradient(energies: Mapping[int, LayerEnergies], statistics: Capture) -> Scores:
    """What an error of a pair's keys costs in loss, to second order: its energy times that of the loss's derivative."""
    return {index: layer.gradient * layer.key for index, layer in energies.items()}


RULES: dict[str, Callable[[Mapping[int, LayerEnergies], Capture], Scores]] = {
    rule.__name__: rule for rule in (uniform, bound, mean_key, energy, product, gradient)
}


class Allocator:
    """Bits of a model's pairs by any rule, measured on a text once.

    Args:
        model: the model.
        rows: (rows, tokens) token ids of the text.
    """

    def __init__(self, model: Any, rows: Tensor) -> None:
        self.energies = measure_energies(model, rows)
        self.statistics = capture(model, rows)

    def bits(self, rule: str, average: int) -> dict[int, Tensor]:
        """Return (heads, pairs) number of bits of each layer, by its index."""
        scores = RULES[rule](self.energies, self.statistics)
        return {index: greedy_bits(score, average) for index, score in scores.items()}

    @property
    def scales(self) -> dict[int, Tensor]:
        """(heads, pairs) root mean square of the features of each pair of keys, by the index of the layer.

        Norms of heads may have learned to set pairs to 0, as some of Gemma 3's have; these have a small scale.
        """
        return {index: (layer.key / 2).sqrt().clamp_min(1e-6) for index, layer in self.energies.items()}


def stored_bits(bits: Mapping[int, Tensor], norms: int | None = None) -> float:
    """Return the mean number of bits of a feature, with norms of 16 bits: ``norms`` a head, or one for each group."""
    heads = [head for layer in bits.values() for head in layer]
    sizes = [2 * float(head.sum()) + SCALE_BITS * (norms or len(head.unique())) for head in heads]
    return sum(sizes) / sum(2 * len(head) for head in heads)
