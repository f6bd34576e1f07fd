"""Running sums over the attention weights of one layer, from which its attention masses and sinks follow."""

from __future__ import annotations

import torch
from torch import Tensor

from rope_patch.analysis.heads import FIRST_COUNTED_QUERY, OFFSETS, SINK_DISTANCE, LayerHeads

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
    """

    def __init__(self, index: int, heads: int, rows: Tensor) -> None:
        self.index, self.heads, self.rows = index, heads, rows
        self.first_query = min(FIRST_COUNTED_QUERY, rows.shape[1] // 2)
        self.offset = self._zeros(heads, OFFSETS)
        self.offset_count = [0] * OFFSETS
        self.first, self.first_count = self._zeros(heads), 0
        self.distance, self.entropy, self.queries = self._zeros(heads), self._zeros(heads), 0
        self.induction, self.even, self.matched = self._zeros(heads), 0.0, 0
        self.sink_sum = self._zeros(heads)
        self.sinks: list[tuple[Tensor, Tensor, Tensor]] = []  # weight, position, token: (heads, top) of each row

    @staticmethod
    def _zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float64)

    def begin_row(self, row: int) -> None:
        """Begin a row of the text."""
        self.row = row
        tokens = self.rows.shape[1]
        self.far, self.all = self._zeros(self.heads, tokens), self._zeros(self.heads, tokens)
        self.far_count = torch.zeros(tokens, dtype=torch.float64)

    def add(self, start: int, low: int, logits: Tensor, weights: Tensor, distance: Tensor, hidden: Tensor) -> None:
        """Add a block of queries, and their attention to the keys that they may see.

        Args:
            start: the position of the first query [tokens].
            low: the position of the first key [tokens].
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
        ids = self.rows[self.row].to(logits.device)
        skip = max(self.first_query - start, 0)
        if skip >= len(hidden):
            return
        weights, distance, hidden = weights[:, skip:], distance[skip:], hidden[skip:]
        start += skip
        stop = start + weights.shape[1]
        queries = stop - start
        self.queries += queries
        for offset in range(OFFSETS):
            # Otherwise no query of the block has a key that far back.
            if start - low - offset > -queries:
                self.offset[:, offset] += _sum(weights.diagonal(start - low - offset, 1, 2))
                self.offset_count[offset] += int((~hidden).diagonal(start - low - offset).sum())
        if low == 0:
            visible_first = ~hidden[:, 0]
            self.first += _sum(weights[:, visible_first, 0])
            self.first_count += int(visible_first.sum())
        self.distance += _sum(torch.einsum("hqk,qk->hq", weights, distance.to(weights.dtype)))
        # entr(0) is 0, where the weight of a hidden key times its logarithm would be NaN.
        self.entropy += _sum(torch.special.entr(weights).sum(-1))
        # Keys whose previous token is the query's own token. The first key of a text has none before it, and the key
        # of the query itself does not count.
        match = torch.zeros_like(hidden)
        match[:, max(0, 1 - low) :] = ids[start:stop, None] == ids[max(low, 1) - 1 : stop - 1]
        match &= ~hidden & (distance > 0)
        any_match = match.any(-1)
        self.induction += _sum(torch.einsum("hqk,qk->hq", weights, match.to(weights.dtype))[:, any_match])
        visible = (~hidden).sum(-1)
        self.even += float((match.sum(-1) / visible)[any_match].sum())
        self.matched += int(any_match.sum())
        far = (distance >= SINK_DISTANCE) & ~hidden
        self.far[:, low:stop] += torch.einsum("hqk,qk->hk", weights, far.to(weights.dtype)).cpu().double()
        self.far_count[low:stop] += far.sum(0).cpu().double()
        self.all[:, low:stop] += weights.sum(1).cpu().double()

    def end_row(self) -> None:
        """End the row: keep its sinks."""
        draws = self.far / self.far_count.clamp_min(1)
        draws[:, self.far_count < max(SINK_DISTANCE, float(self.far_count.max()) / 4)] = (
            0.0  # too few queries for a mean
        )
        self.sink_sum += torch.where(draws > SINK_WEIGHT, self.all, 0.0).sum(1)
        weight, position = draws.topk(min(SINKS_PER_HEAD, draws.shape[1]))
        self.sinks.append((weight, position, self.rows[self.row, position]))
        if len(self.sinks) > 1:
            weight, position, token = (torch.cat(parts, 1) for parts in zip(*self.sinks, strict=True))
            weight, keep = weight.topk(min(SINKS_PER_HEAD, weight.shape[1]))
            self.sinks = [(weight, position.gather(1, keep), token.gather(1, keep))]
        del self.far, self.all, self.far_count

    def result(self) -> LayerHeads:
        """Return the means."""
        ((weight, position, token),) = self.sinks
        drawn = weight > 0
        counts = torch.tensor(self.offset_count, dtype=torch.float64)
        unknown = torch.full((self.heads,), torch.nan, dtype=torch.float64)
        return LayerHeads(
            index=self.index,
            offset_mass=self.offset / counts.clamp_min(1),
            first_mass=self.first / max(self.first_count, 1),
            sink_mass=self.sink_sum / self.queries,
            sink_position=position.masked_fill(~drawn, -1),
            sink_token=token.masked_fill(~drawn, -1),
            sink_weight=weight,
            induction_mass=self.induction / self.matched if self.matched else unknown,
            induction_chance=torch.tensor(self.even / max(self.matched, 1), dtype=torch.float64),
            repeated_mass=unknown,
            distance=self.distance / self.queries,
            entropy=self.entropy / self.queries,
        )


def _sum(values: Tensor) -> Tensor:
    """Sums over all but the first dimension, in float64 on the CPU."""
    return values.flatten(1).sum(1, dtype=torch.float32).cpu().double()
