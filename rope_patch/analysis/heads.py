"""Where the heads of a model attend: the running sums and the result of ``attention_mass.measure_heads``.

A head's attention mass on a key is the mean weight that it puts there. Its types say what it does with most of it: a
positional head attends to a fixed distance, an induction head to what followed the same token before, and so on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rope_patch.modeling.capture import device_of_sums
from rope_patch.modeling.state_statistics import OfLayers

FIRST_COUNTED_QUERY = 8
"""Queries from this position on are counted: before it, every key is both near and among the first [tokens]."""
OFFSETS = 8
"""Number of distances, from 0 on, whose attention mass is kept one by one."""
SINK_DISTANCE = 8
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
        first_mass: (heads,) mean weight on the first token, over the queries that see it.
        sink_mass: (heads,) mean weight on all sinks together.
        sink_position: (heads, top) the positions of the keys that draw most from afar, the strongest first; -1 where
            there are no more [tokens].
        sink_token: (heads, top) the token ids at these positions.
        sink_weight: (heads, top) the mean weight that they draw from queries at least ``SINK_DISTANCE`` tokens behind.
        induction_mass: (heads,) mean weight on keys whose previous token equals the query's token, over the queries
            that have any; nan when none has.
        induction_chance: () the weight that even attention would put on these keys.
        repeated_mass: (heads,) the induction mass on random tokens twice in a row, where nothing but induction can know
            what follows; nan when the text is too short for it: a match at most ``OFFSETS`` back could be a matter of
            distance.
        distance: (heads,) mean distance of attention [tokens].
        entropy: (heads,) mean entropy of the weights [nats].
    """

    index: int
    offset_mass: Tensor
    first_mass: Tensor
    sink_mass: Tensor
    sink_position: Tensor
    sink_token: Tensor
    sink_weight: Tensor
    induction_mass: Tensor
    induction_chance: Tensor
    repeated_mass: Tensor
    distance: Tensor
    entropy: Tensor

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return len(self.first_mass)

    @property
    def content_mass(self) -> Tensor:
        """Attention that goes neither to near keys, nor to sinks, nor to induction: (heads,)."""
        sinks = torch.maximum(self.first_mass, self.sink_mass)
        return 1 - self.offset_mass.sum(1) - sinks - self.induction_mass.nan_to_num()

    def head_types(self, head: int) -> tuple[str, ...]:
        """Return what a head does with most of its attention.

        ``"diagonal"``, ``"previous token"``, ``"2 back"`` …, ``"first token"``, ``"sink"`` (sinks together, where the
        first token alone is not enough), ``"induction"`` (on the text, less what chance puts there, or on repeated
        tokens).

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
        # NaN stands for what was not measured, and counts as no attention.
        on_text = self.induction_mass[head] - self.induction_chance
        if max(float(on_text.nan_to_num()), float(self.repeated_mass[head].nan_to_num())) >= TYPE_SHARE:
            types.append("induction")
        return tuple(types)


@dataclass(frozen=True, eq=False)
class Heads(OfLayers):
    """Where the heads of a model attend on a text.

    Attributes:
        layers: the layers that were measured, in order.
    """

    layers: tuple[LayerHeads, ...]
    schema: ClassVar[str] = "heads 4"

    def positional(self) -> dict[tuple[int, int], int]:
        """Return the distance of each head that puts most of its attention at one, by layer and head [tokens]."""
        return {
            (layer.index, head): distance
            for layer in self.layers
            for head, distance in (layer.offset_mass >= TYPE_SHARE).nonzero().tolist()
        }


_OFFSET_NAMES = ("diagonal", "previous token", *(f"{offset} back" for offset in range(2, OFFSETS)))


class AttentionSums:
    """Running sums over the attention weights of one layer.

    Args:
        index: the index of the layer.
        heads: the number of query heads.
        rows: (rows, tokens) the token ids of the text that is read.
        device: the device of the layer.
    """

    def __init__(self, index: int, heads: int, rows: Tensor, device: torch.device) -> None:
        self.index = index
        self.heads = heads
        self.rows = rows.to(device)
        self.device = device_of_sums(device)
        self.first_query = min(FIRST_COUNTED_QUERY, rows.shape[1] // 2)
        self.offset = self._zeros(heads, OFFSETS)
        self.offset_count = self._zeros(OFFSETS)
        self.first = self._zeros(heads)
        self.first_count = 0
        self.distance = self._zeros(heads)
        self.entropy = self._zeros(heads)
        self.queries = 0
        self.induction = self._zeros(heads)
        self.even = self._zeros()
        self.matched = 0
        self.sink_sum = self._zeros(heads)
        self.sinks: list[tuple[Tensor, Tensor, Tensor]] = []  # weight, position, token: (heads, top) of each row

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self.device)

    def _sum(self, values: Tensor) -> Tensor:
        """Return the sums over all but the first dimension, in float32."""
        return values.flatten(1).sum(1, dtype=torch.float32).to(self.device)

    def begin_row(self, row: int) -> None:
        """Begin a row of the text."""
        self.row = row
        tokens = self.rows.shape[1]
        self.far = self._zeros(self.heads, tokens)
        self.all = self._zeros(self.heads, tokens)
        self.far_count = self._zeros(tokens)

    def add(
        self, start: int, low: int, window: int, logits: Tensor, weights: Tensor, distance: Tensor, hidden: Tensor
    ) -> None:
        """Add a block of queries, and their attention to the keys that they may see.

        Args:
            start: the position of the first query [tokens].
            low: the position of the first key [tokens].
            window: the number of tokens that a query sees [tokens].
            logits: (heads, queries, keys) the scaled logits, before soft-capping.
            weights: (heads, queries, keys) the attention weights.
            distance: (queries, keys) the distance from each key to the query behind it; negative for keys that come
                later [tokens].
            hidden: (queries, keys) whether a query does not see a key.

        Raises:
            ValueError: a logit that a query sees is no finite number.
        """
        invalid = ~(torch.isfinite(logits) | hidden)
        if bool(invalid.any()):
            head, at = invalid.nonzero()[0, :2].tolist()
            raise ValueError(
                f"layer {self.index}, query head {head} has logits that are no finite numbers at position "
                f"{start + at}: statistics need finite states"
            )
        ids = self.rows[self.row]
        skip = max(self.first_query - start, 0)
        if skip >= len(hidden):
            return
        weights = weights[:, skip:]
        distance = distance[skip:]
        hidden = hidden[skip:]
        start += skip
        stop = start + weights.shape[1]
        self.queries += weights.shape[1]
        for offset in range(OFFSETS):
            # It is empty where no query of the block has a key that far back.
            self.offset[:, offset] += self._sum(weights.diagonal(start - low - offset, 1, 2))
            self.offset_count[offset] += (~hidden).diagonal(start - low - offset).sum().to(self.device)
        if low == 0:
            seeing_first = max(0, min(stop, window) - start)
            self.first += self._sum(weights[:, :seeing_first, 0].contiguous())
            self.first_count += seeing_first
        self.distance += self._sum(torch.einsum("hqk,qk->hq", weights, distance.to(weights.dtype)))
        # entr(0) is 0, where the weight of a hidden key times its logarithm would be NaN.
        self.entropy += self._sum(torch.special.entr(weights).sum(-1))
        # Keys whose previous token is the query's own token. The first key of a text has none before it, and the key
        # of the query itself does not count.
        match = torch.zeros_like(hidden)
        match[:, max(0, 1 - low) :] = ids[start:stop, None] == ids[max(low, 1) - 1 : stop - 1]
        match &= ~hidden & (distance > 0)
        matched = match.any(-1).nonzero()[:, 0]  # a GPU is waited for here and where logits are checked
        self.induction += self._sum(torch.einsum("hqk,qk->hq", weights, match.to(weights.dtype))[:, matched])
        visible = (~hidden).sum(-1)
        self.even += (match.sum(-1) / visible)[matched].sum().to(self.device)
        self.matched += len(matched)
        far = (distance >= SINK_DISTANCE) & ~hidden
        self.far[:, low:stop] += torch.einsum("hqk,qk->hk", weights, far.to(weights.dtype)).to(self.device)
        self.far_count[low:stop] += far.sum(0).to(self.device)
        self.all[:, low:stop] += weights.sum(1).to(self.device)

    def end_row(self) -> None:
        """End the row: keep its sinks."""
        draws = self.far / self.far_count.clamp_min(1)
        too_few = self.far_count < (self.far_count.max() / 4).clamp_min(SINK_DISTANCE)  # queries for a mean
        draws = draws.masked_fill(too_few, 0.0)
        self.sink_sum += torch.where(draws > SINK_WEIGHT, self.all, 0.0).sum(1)
        weight, position = draws.topk(min(SINKS_PER_HEAD, draws.shape[1]))
        self.sinks.append((weight, position, self.rows[self.row].to(self.device)[position]))

    def result(self) -> LayerHeads:
        """Return the means."""
        weight, position, token = (torch.cat(parts, 1) for parts in zip(*self.sinks, strict=True))
        weight, keep = weight.topk(min(SINKS_PER_HEAD, weight.shape[1]))
        drawn = weight > 0
        unknown = torch.full_like(self.induction, torch.nan)
        means = dict(
            offset_mass=self.offset / self.offset_count.clamp_min(1),
            first_mass=self.first / max(self.first_count, 1),
            sink_mass=self.sink_sum / self.queries,
            sink_position=position.gather(1, keep).masked_fill(~drawn, -1),
            sink_token=token.gather(1, keep).masked_fill(~drawn, -1),
            sink_weight=weight,
            induction_mass=self.induction / self.matched if self.matched else unknown,
            induction_chance=self.even / max(self.matched, 1),
            repeated_mass=unknown,
            distance=self.distance / self.queries,
            entropy=self.entropy / self.queries,
        )
        return LayerHeads(index=self.index, **{name: mean.cpu() for name, mean in means.items()})
