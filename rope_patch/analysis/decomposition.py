"""How the logit of a head's mean query and mean key depends on distance, pair by pair.

*Source*: Jonasson, arXiv:2503.01832, eq. 13 and 14: the logit of the mean query at distance ``p`` behind it of
the mean key is ``D(p) = sum_i d_i(p)`` with ``d_i(p) = ||q_i|| ||k_i|| cos(phi_i - inv_freq_i p)``. The paper prints
``+``, which contradicts its own eq. 16, its remark that pair 0 at an angle of 1 selects the previous token, and
definition 3.1; ``-`` is what rotation gives for a query at ``m`` and a key at ``m - p``, and what is used here.

Arrays are by query head: key heads are repeated for the query heads they serve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rope_patch.modeling.statistics import LayerCapture


def phi(query: Tensor, key: Tensor) -> Tensor:
    """Return the angle from mean queries to mean keys, in (0, 2π] [rad].

    Args:
        query: (..., pairs, 2).
        key: (..., pairs, 2).

    >>> query, key = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.0, -1.0], [2.0, 0.0]])
    >>> [round(x / math.pi, 4) for x in phi(query, key).tolist()]  # equal directions are a whole turn
    [1.5, 2.0]
    """
    whole = 2 * math.pi
    angle: Tensor = torch.atan2(key[..., 1], key[..., 0]) - torch.atan2(query[..., 1], query[..., 0])
    angle = torch.remainder(angle, whole)
    return torch.where(angle == 0, whole, angle)


def contributions(query: Tensor, key: Tensor, inv_freq: Tensor, distances: Tensor) -> Tensor:
    """Return ``d_i(p)`` (Jonasson eq. 13): (..., pairs, distances), unscaled.

    Args:
        query: (..., pairs, 2) mean queries.
        key: (..., pairs, 2) mean keys.
        inv_freq: (pairs,) [rad/token].
        distances: (distances,) how far the key lies behind the query [tokens].

    >>> q, k = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 3.0]])  # a key a quarter turn ahead of the query
    >>> contributions(q, k, torch.tensor([math.pi / 2]), torch.tensor([0, 1, 2])).round().abs().tolist()
    [[0.0, 6.0, 0.0]]
    """
    amplitude: Tensor = torch.linalg.vector_norm(query, dim=-1) * torch.linalg.vector_norm(key, dim=-1)
    angles = phi(query, key)[..., None] - inv_freq.to(query.dtype)[:, None] * distances.to(query.dtype)
    return amplitude[..., None] * angles.cos()


@dataclass(frozen=True, eq=False)
class Decomposition:
    """The mean logit of each head of a layer over distance, and the part that each pair adds. Tensors are float64.

    Attributes:
        layer: index.
        distances: (distances,) how far the key lies behind the query [tokens].
        pairs: (heads, pairs, distances) ``d_i(p)``.
        constant: (heads,) what features that do not rotate at all (partial rotary) add at every distance.
        scaling: factor on q·k.
        rotary_scaling: factor that cos and sin of the table put on the part of the pairs: attention scaling squared.
        softcap: of the scaled logits, where the model has one.
        window: distances that a query sees [tokens].
    """

    layer: int
    distances: Tensor
    pairs: Tensor
    constant: Tensor
    scaling: float
    rotary_scaling: float
    softcap: float | None
    window: int

    @property
    def total(self) -> Tensor:
        """``D(p)`` (Jonasson eq. 14, figures 5 and 10): (heads, distances), of the rotary pairs alone and unscaled."""
        return self.pairs.sum(1)

    @property
    def logits(self) -> Tensor:
        """The logits that softmax would see: (heads, distances); all features, every scaling, and soft-capping."""
        logits = (self.total * self.rotary_scaling + self.constant[:, None]) * self.scaling
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def pattern(self, queries: Sequence[int]) -> Tensor:
        """Return the attention of mean queries to mean keys at all positions (Jonasson figure 10).

        Args:
            queries: positions of the queries [tokens].

        Returns:
            (heads, queries, positions) weights; each query's sum to 1 over the positions it sees, none behind it.

        Raises:
            ValueError: a query position whose distances were not computed.
        """
        column_of = {distance: at for at, distance in enumerate(self.distances.tolist())}
        out = torch.zeros(len(self.constant), len(queries), max(queries, default=-1) + 1, dtype=torch.float64)
        for column, query in enumerate(queries):
            visible = range(min(query, self.window - 1), -1, -1)
            if query < 0 or any(distance not in column_of for distance in visible):
                raise ValueError(f"position {query} needs every whole distance from 0 to {max(visible, default=0)}")
            at = [column_of[distance] for distance in visible]
            out[:, column, query + 1 - len(at) : query + 1] = self.logits[:, at].softmax(-1)
        return out


def decompose(layer: LayerCapture, distances: Tensor | None = None) -> Decomposition:
    """Return how the mean logit of each head of a layer depends on distance.

    Args:
        layer: from a capture, whose table and scaling are those in use.
        distances: (distances,) [tokens]; 0 to the layer's context by default.
    """
    if distances is None:
        distances = torch.arange(layer.context + 1)
    query, key = mean_pairs(layer)
    keys = layer.key_by_query_head
    return Decomposition(
        layer=layer.index,
        distances=distances,
        pairs=contributions(query, key, layer.inv_freq.double(), distances),
        constant=(layer.query.unrotated * keys.unrotated).sum(-1),
        scaling=layer.scaling,
        rotary_scaling=layer.attention_scaling**2,
        softcap=layer.softcap,
        window=layer.context,
    )


def mean_pairs(layer: LayerCapture) -> tuple[Tensor, Tensor]:
    """Return the mean queries and keys by query head: (heads, pairs, 2) each."""
    return layer.query.mean_pairs, layer.key_by_query_head.mean_pairs


def rotate(pairs: Tensor, inv_freq: Tensor, positions: Tensor) -> Tensor:
    """Return vectors rotated to positions: (..., pairs, positions, 2).

    Args:
        pairs: (..., pairs, 2).
        inv_freq: (pairs,) [rad/token].
        positions: (positions,) [tokens].
    """
    return turn(pairs[..., None, :], inv_freq, positions)


def turn(pairs: Tensor, inv_freq: Tensor, positions: Tensor) -> Tensor:
    """Return vectors (..., pairs, positions, 2), each rotated to its own position; as :func:`rotate` otherwise."""
    angles = inv_freq.to(pairs.dtype)[:, None] * positions.to(pairs.dtype)
    cos, sin, x, y = angles.cos(), angles.sin(), pairs[..., 0], pairs[..., 1]
    return torch.stack((x * cos - y * sin, x * sin + y * cos), dim=-1)


def query_over_distances(layer: LayerCapture) -> Tensor:
    """Return the scaled mean query averaged over the layer's distances, 0 to ``context - 1``: (heads, head_dim).

    Its product with a key before rotation is the key's logit with the mean query, averaged over the distances from
    which it can be seen: ``mean_p (R^p q)·k``.
    """
    angles = layer.inv_freq.double()[:, None] * torch.arange(layer.context)
    cos, sin = angles.cos().mean(-1), angles.sin().mean(-1)
    x, y = layer.query.mean_pairs.unbind(-1)
    turned = torch.stack((x * cos - y * sin, x * sin + y * cos), dim=-1) * layer.attention_scaling**2
    return as_features(turned, layer.query.unrotated, layer.query.interleaved) * layer.scaling


def as_features(pairs: Tensor, unrotated: Tensor, interleaved: bool) -> Tensor:
    """Return pairs (..., pairs, 2) and unrotated features (..., rest) as heads (..., head_dim) of a layout."""
    rotary = pairs.flatten(-2) if interleaved else torch.cat((pairs[..., 0], pairs[..., 1]), dim=-1)
    return torch.cat((rotary, unrotated), dim=-1)
