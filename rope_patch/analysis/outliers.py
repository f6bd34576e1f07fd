"""Rotary outliers and offset features: bounds on frequency and angle, and the data of Jonasson's figures.

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
from rope_patch.modeling.statistics import Capture

OUTLIER_RATIO = 5.0
"""A pair is an outlier above this multiple of the median radius, where no other one is given."""


# --- bounds ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Bounds:
    """The bounds of Jonasson on the offset features of a table.

    Attributes:
        context: the greatest distance that is considered [tokens].
        inv_freq: (pairs,) the table [rad/token].
        limit: the frequency below which no turn is completed, ``2π / context`` [rad/token].
        partial: (pairs,) whether a pair lies below it, unrotated pairs included (eq. 15).
        angle: (pairs,) the angle to exceed, ``π + context inv_freq / 2`` (eq. 16) [rad]; inf for unrotated pairs.
            Beyond 2π, and so out of reach, for pairs that are not partial.
    """

    context: int
    inv_freq: Tensor
    limit: float
    partial: Tensor
    angle: Tensor


def bounds(inv_freq: Tensor, context: int) -> Bounds:
    """Return the frequency and the angle bound of a table, as it is in use: scaled, truncated, learned or plain.

    Args:
        inv_freq: (pairs,) the table [rad/token].
        context: the greatest distance that is considered [tokens].

    Raises:
        ValueError: a context below 1 token.

    >>> table_bounds = bounds(frequencies.geometric(1e4, 32), 2048)
    >>> table_bounds.partial.nonzero().flatten().tolist(), round(float(table_bounds.angle[15]), 2)
    ([11, 12, 13, 14, 15], 3.32)
    """
    table = inv_freq.double()
    limit = frequencies.offset_frequency_bound(context)
    angle = frequencies.offset_angle_bound(table, context).masked_fill(frequencies.unrotated(table), math.inf)
    return Bounds(context, inv_freq, limit, table < limit, angle)


# --- where the pairs lie ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Scatter:
    """Every pair of every query head, one entry each: the data of Jonasson's figures 2, 8 and 11 and of its table 2.

    Key heads are repeated for the query heads they serve, as Jonasson counts them.

    Attributes:
        layer: (entries,) index of the layer.
        head: (entries,) query head.
        pair: (entries,) index of the pair, fastest first.
        inv_freq: (entries,) frequency of the pair [rad/token].
        key_radius: (entries,) length of the mean key.
        query_radius: (entries,) length of the mean query.
        phi: (entries,) angle of the mean key minus that of the mean query, in (0, 2π] [rad].
        key_deviation: (entries,) circular standard deviation of the keys [rad].
        query_deviation: (entries,) circular standard deviation of the queries [rad].
        partial: (entries,) whether the pair lies below the frequency bound.
        angle: (entries,) the angle bound [rad].
    """

    layer: Tensor
    head: Tensor
    pair: Tensor
    inv_freq: Tensor
    key_radius: Tensor
    query_radius: Tensor
    phi: Tensor
    key_deviation: Tensor
    query_deviation: Tensor
    partial: Tensor
    angle: Tensor

    @property
    def within_angle(self) -> Tensor:
        """(entries,) whether the pair is an offset feature: its angle exceeds the bound."""
        return self.phi > self.angle

    def radius(self, states: str) -> Tensor:
        """Return ``key_radius`` for ``"key"``, ``query_radius`` for ``"query"``."""
        if states not in ("key", "query"):
            raise ValueError(f"states must be 'key' or 'query', got {states!r}")
        return self.key_radius if states == "key" else self.query_radius


def scatter(capture: Capture, *, context: int | None = None) -> Scatter:
    """Return radius, angle, deviation and bounds of every pair of every head.

    Args:
        capture: the statistics of queries and keys, from :func:`~rope_patch.modeling.capture.capture`.
        context: the greatest distance that the bounds consider, for all layers; by default each layer's own, which is
            the context the config states, or the window where a layer slides [tokens].
    """
    columns: dict[str, list[Tensor]] = {}
    for layer in capture.layers:
        limits = bounds(layer.inv_freq, layer.context if context is None else context)
        query, key = layer.query, layer.key_by_query_head
        heads, pairs = query.heads, query.pairs
        entries = {
            "layer": torch.full((heads, pairs), layer.index),
            "head": torch.arange(heads)[:, None].expand(heads, pairs),
            "pair": torch.arange(pairs).expand(heads, pairs),
            "inv_freq": layer.inv_freq.double().expand(heads, pairs),
            "key_radius": key.radius,
            "query_radius": query.radius,
            "phi": phi(query.mean_pairs, key.mean_pairs),
            "key_deviation": key.circular_deviation,
            "query_deviation": query.circular_deviation,
            "partial": limits.partial.expand(heads, pairs),
            "angle": limits.angle.expand(heads, pairs),
        }
        for name, values in entries.items():
            columns.setdefault(name, []).append(values.reshape(-1))
    return Scatter(**{name: torch.cat(values) for name, values in columns.items()})


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


# --- the outliers themselves -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OutlierPair:
    """A pair whose mean key (or query) is long, and where it lies with regard to the bounds.

    Attributes:
        states: the states whose mean vector is long, ``"key"`` or ``"query"``.
        layer: the index of the layer.
        head: the index of the query head.
        pair: the index of the pair, fastest first.
        wavelength: the wavelength of the pair; inf when it does not rotate [tokens].
        turns: the number of turns that the pair makes over the context.
        radius: the length of the mean vector.
        ratio: the radius divided by the median radius of all pairs.
        deviation: the circular standard deviation of the vectors' directions [rad].
        phi: angle of the mean key minus that of the mean query, in (0, 2π] [rad].
        angle: the angle bound [rad]; inf when it does not rotate.
        kind: the place within the bounds: ``"offset feature"`` (inside both bounds), ``"partial turn"`` (inside the
            frequency bound alone), ``"full turns"`` or ``"unrotated"``.
    """

    states: str
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


def outlier_pairs(
    capture: Capture,
    states: str = "key",
    *,
    ratio: float = OUTLIER_RATIO,
    median: float | None = None,
    context: int | None = None,
) -> tuple[OutlierPair, ...]:
    """Return the pairs whose radius is many times the median, the longest first.

    Jonasson's thresholds are radii of the models it measured; the median makes one rule for models of any scale.

    Args:
        capture: the statistics of queries and keys, from :func:`~rope_patch.modeling.capture.capture`.
        states: the states whose mean vectors are searched, ``"key"`` or ``"query"``.
        ratio: the multiple of the median radius above which a pair is an outlier.
        median: the radius that ``ratio`` refers to; by default the median of the layers looked at.
        context: the greatest distance that the bounds consider, as for :func:`scatter` [tokens].

    Raises:
        ValueError: a ratio that is not positive, or other states.
    """
    if not ratio > 0:
        raise ValueError(f"ratio must be > 0, got {ratio}")
    points = scatter(capture, context=context)
    radius = points.radius(states)
    deviation = points.key_deviation if states == "key" else points.query_deviation
    median = float(radius.median()) if median is None else median
    contexts = {layer.index: layer.context if context is None else context for layer in capture.layers}
    outliers = (radius > ratio * median).nonzero().flatten()
    pairs = []
    for entry in outliers[radius[outliers].argsort(descending=True)].tolist():
        layer, f = int(points.layer[entry]), float(points.inv_freq[entry])
        is_unrotated = bool(frequencies.unrotated(points.inv_freq[entry : entry + 1])[0])
        inside = "offset feature" if points.within_angle[entry] else "partial turn"
        pairs.append(
            OutlierPair(
                states=states,
                layer=layer,
                head=int(points.head[entry]),
                pair=int(points.pair[entry]),
                wavelength=math.inf if is_unrotated else 2 * math.pi / f,
                turns=contexts[layer] * f / (2 * math.pi),
                radius=float(radius[entry]),
                ratio=float(radius[entry]) / median if median else math.inf,
                deviation=float(deviation[entry]),
                phi=float(points.phi[entry]),
                angle=float(points.angle[entry]),
                kind="unrotated" if is_unrotated else inside if points.partial[entry] else "full turns",
            )
        )
    return tuple(pairs)
