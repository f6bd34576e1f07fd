"""Running sums over the attention weights of one layer, from which its attention masses and sinks follow."""

from __future__ import annotations

import torch
from torch import Tensor

from rope_patch.analysis.heads import FIRST_COUNTED_QUERY, OFFSETS, SINK_DISTANCE, LayerHeads
from rope_patch.modeling.capture import device_of_sums

SINK_WEIGHT = 0.3
"""Mean weight above which a key is a sink (Gu et al., arXiv:2410.10781)."""
SINKS_PER_HEAD = 4
"""Number of sinks that are kept for each head."""


class AttentionSums:
    """Running sums over the attention weights of one layer.

    Args:
        index: the index of the layer.
        heads: the number of query heads.
        rows: (rows, tokens) the token ids of the text that is read.
        device: the device of the layer.
    """

    def __init__(self, index: int, heads: int, rows: Tensor, device: torch.device) -> None:
        self.index, self.heads, self.rows, self.device = index, heads, rows.to(device), device_of_sums(device)
        self.first_query = min(FIRST_COUNTED_QUERY, rows.shape[1] // 2)
        self.offset = self._zeros(heads, OFFSETS)
        self.offset_count = self._zeros(OFFSETS)
        self.first, self.first_count = self._zeros(heads), 0
        self.distance, self.entropy, self.queries = self._zeros(heads), self._zeros(heads), 0
        self.induction, self.even, self.matched = self._zeros(heads), self._zeros(), 0
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
        self.far, self.all = self._zeros(self.heads, tokens), self._zeros(self.heads, tokens)
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
        weights, distance, hidden = weights[:, skip:], distance[skip:], hidden[skip:]
        start += skip
        stop = start + weights.shape[1]
        queries = stop - start
        self.queries += queries
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
