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
from dataclasses import dataclass

import torch
from torch import Tensor

from rope_patch import frequencies
from rope_patch.modeling.state_statistics import Capture

OUTLIER_RATIO = 5.0
"""A pair is an outlier above this multiple of the median radius, where no other one is given."""


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
    angle: Tensor = torch.atan2(key[..., 1], key[..., 0]) - torch.atan2(query[..., 1], query[..., 0])
    angle = torch.remainder(angle, whole)
    return torch.where(angle == 0, whole, angle)


@dataclass(frozen=True)
class OutlierPair:
    """A pair whose mean key (or query) is long, and where it lies with regard to the bounds.

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


def outlier_pairs(capture: Capture, states: str = "key", *, ratio: float = OUTLIER_RATIO) -> tuple[OutlierPair, ...]:
    """Return the pairs whose radius is many times the median of all pairs, the longest first.

    Jonasson's thresholds are radii of the models it measured; the median makes one rule for models of any scale. Key
    heads count once for each query head that they serve, as Jonasson counts them.

    Args:
        capture: the statistics of queries and keys, from :func:`~rope_patch.modeling.capture.capture`.
        states: the states whose mean vectors are searched, ``"key"`` or ``"query"``.
        ratio: the multiple of the median radius above which a pair is an outlier.

    Raises:
        ValueError: a ratio that is not positive, or other states.
    """
    if not ratio > 0:
        raise ValueError(f"ratio must be > 0, got {ratio}")
    if states not in ("key", "query"):
        raise ValueError(f"states must be 'key' or 'query', got {states!r}")
    if states == "key":
        means = [layer.key_by_query_head for layer in capture.layers]
    else:
        means = [layer.query for layer in capture.layers]
    median = float(torch.cat([mean.radius.flatten() for mean in means]).median())
    pairs = []
    for layer, mean in zip(capture.layers, means, strict=True):
        table = layer.inv_freq.double()
        rests = frequencies.unrotated(table)
        waves = frequencies.wavelength(table)
        turns = frequencies.turns(table, layer.context)
        radius = mean.radius
        below, limit = bounds(table, layer.context)
        angle = phi(layer.query.mean_pairs, layer.key_by_query_head.mean_pairs)
        for head, pair in (radius > ratio * median).nonzero().tolist():
            if rests[pair]:
                kind = "unrotated"
            elif not below[pair]:
                kind = "full turns"
            elif angle[head, pair] > limit[pair]:
                kind = "offset feature"
            else:
                kind = "partial turn"
            pairs.append(
                OutlierPair(
                    layer=layer.index,
                    head=head,
                    pair=pair,
                    wavelength=float(waves[pair]),
                    turns=float(turns[pair]),
                    radius=float(radius[head, pair]),
                    ratio=float(radius[head, pair]) / median if median else math.inf,
                    deviation=float(mean.circular_deviation[head, pair]),
                    phi=float(angle[head, pair]),
                    angle=float(limit[pair]),
                    kind=kind,
                )
            )
    return tuple(sorted(pairs, key=lambda pair: pair.radius, reverse=True))
