"""Rotary outliers and offset features, and the bounds on their frequency and angle.

*Source*: Jonasson, *Rotary Outliers and Rotary Offset Features in Large Language Models*, arXiv:2503.01832. By
its definition 3.1 a pair is an offset feature when the mean query's logit with the mean key in it is smaller at every
distance ``0 < p <= L`` than at 0. That takes a pair that completes no turn in ``L`` (eq. 15) and an angle between key
and query beyond ``π + L inv_freq / 2`` (eq. 16).

Two things to know. With distances in whole tokens, a pair faster than eq. 15 can also satisfy the definition, when its
angle is so close to 2π that no whole number of tokens completes a turn to it: the bounds are those of real ``p``. And
an unrotated pair never satisfies it, since its logit is the same at every distance, although it lies below eq. 15: so
no angle is enough for it here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rope_patch import frequencies
from rope_patch.modeling.attention_layers import AttentionLayer, find_attention_layers
from rope_patch.modeling.capture import capture
from rope_patch.modeling.state_statistics import Capture, LayerCapture, pairs_of
from rope_patch.patching.locate import locate
from rope_patch.runtime import progress
from rope_patch.runtime.captions import ranges_text

OUTLIER_RATIO = 5.0
"""A pair is an outlier above this multiple of the median radius."""
RADII = (6.0, 9.0, 12.0)
"""Radii above which Jonasson's table 2 calls a pair an outlier."""
RELAXED_ANGLE = 0.1
"""Angle by which Jonasson's table 2 relaxes the angle bound in its last column [rad]."""
BIAS_TOKENS = 64
"""Number of tokens from all over the vocabulary that biases are compared with: no text is needed for that."""

KINDS = ("full turns", "partial turn", "offset feature", "unrotated")
"""Places of a pair within the bounds: in none, in that of frequency, in both; unrotated pairs have no angle bound."""


def bounds(inv_freq: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return the frequency and the angle bound of a table, as it is in use: scaled, truncated, learned or plain.

    Args:
        inv_freq: (pairs,) the table [rad/token].
        context: the greatest distance that is considered [tokens].

    Returns:
        (pairs,) whether a pair lies below the frequency ``2π / context``, unrotated pairs included (eq. 15), and
        (pairs,) the angle to exceed, ``π + context inv_freq / 2`` (eq. 16) [rad]: nan for unrotated pairs, and beyond
        2π, so out of reach, for pairs that are not below the frequency.

    Raises:
        ValueError: a context below 1 token.

    >>> below, angle = bounds(frequencies.geometric(1e4, 32), 2048)
    >>> below.nonzero().flatten().tolist(), round(float(angle[15]), 2)
    ([11, 12, 13, 14, 15], 3.32)
    """
    table = inv_freq.double()
    return table < frequencies.offset_frequency_bound(context), frequencies.offset_angle_bound(table, context)


def phi(query: Tensor, key: Tensor) -> Tensor:
    """Return the angle from mean queries to mean keys, in (0, 2π] [rad].

    Args:
        query: (..., pairs, 2) the mean queries.
        key: (..., pairs, 2) the mean keys.

    >>> query, key = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.0, -1.0], [2.0, 0.0]])
    >>> [round(x / math.pi, 4) for x in phi(query, key).tolist()]  # equal directions are a whole turn
    [1.5, 2.0]
    """
    whole = 2 * math.pi
    behind: Tensor = torch.atan2(query[..., 1], query[..., 0]) - torch.atan2(key[..., 1], key[..., 0])
    return whole - torch.remainder(behind, whole)


@dataclass(frozen=True)
class MeanPair:
    """A pair of a mean key (or query), and where it lies with regard to the bounds.

    Attributes:
        layer: the index of the layer.
        head: the index of the query head.
        pair: the index of the pair, fastest first.
        wavelength: the wavelength of the pair; inf when it does not rotate [tokens].
        turns: the number of turns that the pair makes over the context.
        radius: the length of the mean vector.
        ratio: the radius divided by the median radius of all pairs.
        deviation: the circular standard deviation of the vectors' directions [rad].
        phi: angle of the mean key minus that of the mean query, in (0, 2π] [rad].
        angle: the angle bound [rad]; nan when it does not rotate.
        kind: the place within the bounds: ``"offset feature"`` (inside both bounds), ``"partial turn"`` (inside the
            frequency bound alone), ``"full turns"`` or ``"unrotated"``.
    """

    layer: int
    head: int
    pair: int
    wavelength: float
    turns: float
    radius: float
    ratio: float
    deviation: float
    phi: float
    angle: float
    kind: str


def mean_pairs(capture: Capture, states: str = "key") -> tuple[MeanPair, ...]:
    """Return every pair of the mean keys or queries, the longest first.

    Key heads count once for each query head that they serve, as Jonasson counts them.

    Args:
        capture: the statistics of queries and keys, from :func:`~rope_patch.modeling.capture.capture`.
        states: the states whose mean vectors are taken, ``"key"`` or ``"query"``.

    Raises:
        ValueError: other states.
    """
    names = {"key": "key_by_query_head", "query": "query"}
    if states not in names:
        raise ValueError(f"states must be 'key' or 'query', got {states!r}")
    means = [getattr(layer, names[states]) for layer in capture.layers]
    median = torch.cat([mean.radius.flatten() for mean in means]).median()
    pairs: list[MeanPair] = []
    for layer, mean in zip(capture.layers, means, strict=True):
        table = layer.inv_freq.double()
        below, limit = bounds(table, layer.context)
        angle = phi(layer.query.mean_pairs, layer.key_by_query_head.mean_pairs)
        kinds = below.long() + (angle > limit) + 2 * frequencies.unrotated(table)
        columns = (
            torch.tensor(layer.index),
            torch.arange(mean.heads)[:, None],
            torch.arange(mean.pairs),
            frequencies.wavelength(table),
            frequencies.turns(table, layer.context),
            mean.radius,
            mean.radius / median,
            mean.circular_deviation,
            angle,
            limit,
        )
        flat = [column.expand(mean.radius.shape).flatten().tolist() for column in columns]
        pairs += map(MeanPair, *flat, (KINDS[kind] for kind in kinds.flatten().tolist()))
    return tuple(sorted(pairs, key=lambda pair: pair.radius, reverse=True))


def outlier_pairs(capture: Capture) -> tuple[MeanPair, ...]:
    """Return the pairs of keys whose radius is over :data:`OUTLIER_RATIO` times the median of all, the longest first.

    Jonasson's thresholds are radii of the models it measured; the median makes one rule for models of any scale.

    Args:
        capture: the statistics of queries and keys, from :func:`~rope_patch.modeling.capture.capture`.
    """
    return tuple(pair for pair in mean_pairs(capture) if pair.ratio > OUTLIER_RATIO)


def recall(outliers: Sequence[MeanPair], radius: float) -> dict[str, float]:
    """Return the recall of both bounds on the pairs that are longer than a radius; nan where there are none.

    ``"nearly"`` is the recall of an angle bound that is :data:`RELAXED_ANGLE` smaller.

    *Source*: Jonasson, table 2. Unrotated pairs lie below the frequency bound.
    """
    kinds = [pair.kind for pair in outliers]
    nearly = [pair for pair in outliers if pair.kind != "full turns" and pair.phi > pair.angle - RELAXED_ANGLE]
    count = len(kinds) or math.nan
    return {
        "radius": radius,
        "outliers": len(kinds),
        "below": 1 - kinds.count("full turns") / count,
        "beyond": kinds.count("offset feature") / count,
        "nearly": len(nearly) / count,
    }


def once_per_key_head(capture: Capture, pairs: Sequence[MeanPair]) -> list[MeanPair]:
    """Return the pairs of keys without those that only name a key head again, for another of its query heads."""
    return [pair for pair in pairs if pair.head % capture.layer(pair.layer).groups == 0]


def outlier_sentence(capture: Capture, pairs: Sequence[MeanPair], states: str) -> str:
    """Return a sentence on the outlier pairs of a model; key heads count once, not once for each query head.

    Args:
        capture: the statistics of queries and keys.
        pairs: every pair of the mean states, from :func:`mean_pairs`.
        states: ``"key"`` or ``"query"``.
    """
    own = once_per_key_head(capture, pairs) if states == "key" else list(pairs)
    outliers = [pair for pair in own if pair.ratio > OUTLIER_RATIO]
    if not outliers:
        return (
            f"No mean {states} is an outlier: none of {len(own)} pairs is over {OUTLIER_RATIO:g} times the median "
            "length."
        )
    often = [str(pair) for pair, _ in Counter(pair.pair for pair in outliers).most_common(4)]
    below, all_below = (100 * recall(some, 0.0)["below"] for some in (outliers, own))
    # The angle bound is one of a query head and its key head.
    by_head = [pair for pair in pairs if pair.ratio > OUTLIER_RATIO]
    beyond, all_beyond = (100 * recall(some, 0.0)["beyond"] for some in (by_head, pairs))
    return (
        f"{len(outliers)} of {len(own)} mean {states} pairs are outliers, over {OUTLIER_RATIO:g} and up to "
        f"{outliers[0].ratio:.0f} times the median length, most often in pairs {', '.join(often)}: {below:.0f} % make "
        f"no full turn within the context (of all pairs {all_below:.0f} %), and, by query head, {beyond:.0f} % lie "
        f"beyond the angle bound, too (of all {all_beyond:.0f} %)."
    )


@dataclass(frozen=True)
class KeyBias:
    """A pair of a bias that is long beside the keys: it is in every key that the module puts out.

    Attributes:
        module: the name of the module, such as ``"k_proj"``.
        layer: the index of the layer.
        head: the index of the key head.
        pair: the index of the pair, fastest first.
        radius: the length of the pair of the bias.
        ratio: the radius divided by the median radius of all pairs of mean keys.
    """

    module: str
    layer: int
    head: int
    pair: int
    radius: float
    ratio: float


def key_biases(model: nn.Module, layers: Sequence[AttentionLayer] | None = None) -> tuple[KeyBias, ...]:
    """Return the pairs of biases that make outliers of keys, whatever is read, the longest first.

    Args:
        model: a causal language model of transformers. It reads :data:`BIAS_TOKENS` tokens, if its keys have a bias.
        layers: its attention layers, where they are known already.
    """
    if layers is None:
        layers = find_attention_layers(model)
    own = [layer for layer in layers if layer.keys_of == layer.index]
    biases = {layer: bias for layer in own if (bias := layer.parts["key"].bias) is not None}
    if not biases:
        return ()
    root: Any = locate(model).model
    size = root.get_input_embeddings().num_embeddings
    with progress.work(0):
        seen = capture(model, torch.arange(BIAS_TOKENS) * size // BIAS_TOKENS)
    median = float(torch.cat([layer.key.radius.flatten() for layer in seen.layers]).median())
    names = {module: name.rpartition(".")[2] for name, module in model.named_modules()}
    found = []
    for layer, bias in biases.items():
        radius = torch.linalg.vector_norm(pairs_of(bias, layer.table.pairs, layer.interleaved), dim=-1)
        for head, pair in (radius > OUTLIER_RATIO * median).nonzero().tolist():
            size = float(radius[head, pair])
            found.append(KeyBias(names[layer.parts["key"].module], layer.index, head, pair, size, size / median))
    return tuple(sorted(found, key=lambda bias: -bias.radius))


def bias_sentences(biases: Sequence[KeyBias]) -> list[str]:
    """Return a sentence on the biases of keys; none without an outlier among them."""
    if not biases:
        return []
    first = biases[0]
    sentence = (
        f"{first.module} of layer {first.layer} has a bias of {first.radius:.0f} in pair {first.pair}, "
        f"{first.ratio:.0f} times the median key: what shares a scale with it in a cache is rounded coarsely"
    )
    if len(biases) > 1:
        layers = ranges_text(sorted({bias.layer for bias in biases}))
        sentence += f". {len(biases)} biases are over {OUTLIER_RATIO:g} times the median key, in layers {layers}"
    return [f"{sentence}."]


def contributions(layer: LayerCapture, head: int, distances: Tensor) -> Tensor:
    """Return what each pair adds to the scaled logit of a head's mean query and mean key, by their distance.

    *Source*: Jonasson, eq. 13 and 14: ``d_i(p) = |q_i| |k_i| cos(phi_i - inv_freq_i p)``, and ``D(p)``, their sum over
    pairs. The paper prints ``+`` in the cosine, which contradicts its eq. 16 and definition 3.1.

    Args:
        layer: the statistics of a layer.
        head: the index of the query head.
        distances: (distances,) how far the key lies behind the query [tokens].

    Returns:
        (pairs, distances) logits, before soft-capping.
    """
    query = layer.query
    key = layer.key_by_query_head
    angle = phi(query.mean_pairs[head], key.mean_pairs[head])
    angles = angle[:, None] - layer.inv_freq.double()[:, None] * distances
    size = query.radius[head] * key.radius[head] * layer.attention_scaling**2 * layer.scaling
    return size[:, None] * angles.cos()
