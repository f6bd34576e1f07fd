"""Where the heads of a model attend: the result of :mod:`rope_patch.analysis.attention_mass`.

A head's attention mass on a key is the mean weight that it puts there. Its types say what it does with most of it: a
positional head attends to a fixed distance, an induction head to what followed the same token before, and so on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rope_patch.modeling.state_statistics import OfLayers

FIRST_COUNTED_QUERY = 8
"""Queries from this position on are counted: before it, every key is both near and among the first [tokens]."""
OFFSETS = 8
"""Number of distances, from 0 on, whose attention mass is kept one by one."""
SINK_DISTANCE = OFFSETS
"""A key counts as a sink by the mean weight that it draws from queries this far behind it, or farther [tokens]."""
TYPE_SHARE = 0.5
"""A head is of a type when this share of its attention goes where the type says."""
SINK_WEIGHT = 0.3
"""Mean weight above which a key is a sink (Gu et al., arXiv:2410.10781)."""
SINKS_PER_HEAD = 4
"""Number of sinks that are kept for each head."""


@dataclass(frozen=True, eq=False)
class LayerHeads:
    """Where the heads of one layer attend. Tensors are float64 on the CPU; means are over the queries counted.

    Attributes:
        index: the index of the layer.
        offset_mass: (heads, offsets) attention mass on the key at each distance; distance 0 is the query's own key.
        logit: (heads, offsets) mean scaled logit at each distance, before soft-capping.
        logit_spread: (heads, offsets) its standard deviation over the queries.
        logit_bound: (heads, offsets) mean of its Cauchy–Schwarz bound, the product of the norms of query and key.
        key_mass: (heads,) mean weight on all keys together: 1, or less where a learned sink takes some (gpt-oss).
        first_mass: (heads,) mean weight on the first token, over the queries that see it.
        sink_mass: (heads,) mean weight on all sinks together.
        sink_position: (heads, top) the positions of the keys that draw most from afar, the strongest first; -1 where
            there are no more [tokens].
        sink_token: (heads, top) the token ids at these positions.
        sink_weight: (heads, top) the mean weight that they draw from queries at least ``SINK_DISTANCE`` tokens behind.
        induction_mass: (heads,) mean weight on the key whose previous token equals the query's token, in random tokens
            twice in a row, where nothing but induction can know what follows; nan where the layer's window is shorter,
            or the text is too short for it: a match at most ``OFFSETS`` back could be a matter of distance.
        distance: (heads,) mean distance of attention [tokens].
        entropy: (heads,) mean entropy of the weights [nats].
    """

    index: int
    offset_mass: Tensor
    logit: Tensor
    logit_spread: Tensor
    logit_bound: Tensor
    key_mass: Tensor
    first_mass: Tensor
    sink_mass: Tensor
    sink_position: Tensor
    sink_token: Tensor
    sink_weight: Tensor
    induction_mass: Tensor
    distance: Tensor
    entropy: Tensor

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return len(self.first_mass)

    @property
    def content_mass(self) -> Tensor:
        """Attention that goes neither to near keys nor to sinks, less the induction mass: (heads,)."""
        sinks = torch.maximum(self.first_mass, self.sink_mass)
        return self.key_mass - self.offset_mass.sum(1) - sinks - self.induction_mass.nan_to_num()

    def head_types(self, head: int) -> tuple[str, ...]:
        """Return what a head does with most of its attention.

        ``"diagonal"``, ``"previous token"``, ``"2 back"`` …, ``"first token"``, ``"sink"`` (sinks together, where the
        first token alone is not enough), ``"learned sink"`` (which has no key), ``"induction"``.

        Args:
            head: the index of the query head.
        """
        types = [
            name for name, mass in zip(_OFFSET_NAMES, self.offset_mass[head], strict=True) if float(mass) >= TYPE_SHARE
        ]
        if float(self.first_mass[head]) >= TYPE_SHARE:
            types.append("first token")
        elif float(self.sink_mass[head]) >= TYPE_SHARE:
            types.append("sink")
        if 1 - float(self.key_mass[head]) >= TYPE_SHARE:
            types.append("learned sink")
        # NaN stands for what was not measured, and counts as no attention.
        if float(self.induction_mass[head].nan_to_num()) >= TYPE_SHARE:
            types.append("induction")
        return tuple(types)


@dataclass(frozen=True, eq=False)
class Heads(OfLayers):
    """Where the heads of a model attend on a text.

    Attributes:
        layers: the layers that were measured, in order.
        others: the indices of the layers that were not: they have no attention, as some of a hybrid model have none, or
            do not attend through transformers' ``AttentionInterface``.
    """

    layers: tuple[LayerHeads, ...]
    others: tuple[int, ...] = ()
    schema: ClassVar[str] = "heads 7"

    def positional(self) -> dict[tuple[int, int], int]:
        """Return the distance of each head that puts most of its attention at one, by layer and head [tokens]."""
        return {
            (layer.index, head): distance
            for layer in self.layers
            for head, distance in (layer.offset_mass >= TYPE_SHARE).nonzero().tolist()
        }


_OFFSET_NAMES = ("diagonal", "previous token", *(f"{offset} back" for offset in range(2, OFFSETS)))
