"""Tokens that attract a head from every distance, and how their keys lie to its mean query."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rope_patch.analysis.decomposition import query_over_distances
from rope_patch.modeling.sources import LayerSource
from rope_patch.modeling.statistics import Capture, LayerCapture, pairs_of
from rope_patch.modeling.streaming import stream, text_digest, token_rows


@dataclass(frozen=True, eq=False)
class Sinks:
    """The tokens of a text that the mean query of each head of a layer prefers, most preferred first.

    Attributes:
        layer: index.
        position: (heads, top) where they are [tokens].
        token: (heads, top) token ids.
        row: (heads, top) row of the text.
        logit: (heads, top) logit of the key with the mean query, averaged over distances (before soft-capping).
        score: (heads, top) the logit in standard deviations above the mean of all keys; 0 where all are equal.
        key: (heads, top, head_dim) the key before rotation.
        alignment: (heads, top, pairs) cosine between key and mean query in each pair, before rotation; 0 for zero
            vectors.
        cosine: (heads, top) cosine between the whole key and the whole mean query, before rotation.
        pairs: of the table.
        interleaved: layout of the pairs.
    """

    layer: int
    position: Tensor
    token: Tensor
    row: Tensor
    logit: Tensor
    score: Tensor
    key: Tensor
    alignment: Tensor
    cosine: Tensor
    pairs: int
    interleaved: bool

    @property
    def key_pairs(self) -> Tensor:
        """The keys by pair: (heads, top, pairs, 2)."""
        return pairs_of(self.key, self.pairs, self.interleaved)


def sinks(
    model: nn.Module,
    token_ids: Tensor,
    capture: Capture,
    *,
    top: int = 4,
    chunk: int | None = None,
    layers: Sequence[int] | None = None,
) -> tuple[Sinks, ...]:
    """Find the tokens whose keys attract a head from every distance: a second pass, through the means of the first.

    A sink draws attention wherever the query stands. So each key's logit with the mean query is averaged over all
    distances within the layer's context; Jonasson finds the keys of sinks aligned with the mean query in the offset
    features. The measure is ours: it takes the mean query for all queries, and knows of a token its key alone, not the
    position. It needs memory for ``top`` keys per head.

    Args:
        model: the captured one.
        token_ids: the captured text.
        capture: what was measured on it.
        top: tokens to keep, per head.
        chunk: tokens per forward pass.
        layers: indices; all captured by default.

    Raises:
        ValueError: as for ``capture``; a model or a text other than the captured one.
    """
    if top < 1:
        raise ValueError(f"top must be >= 1, got {top}")
    rows = token_rows(token_ids)
    if text_digest(rows) != capture.text:
        raise ValueError(
            f"the capture read another text ({capture.tokens} tokens in {capture.rows} rows, {capture.text}), got "
            f"{rows.numel()} in {len(rows)}, {text_digest(rows)}: pass the captured one"
        )
    chosen = capture.chosen(layers)
    preferred = {layer.index: _Preferred(layer, top) for layer in chosen}

    def visit(source: LayerSource, role: str, states: Tensor, ids: Tensor, row: int, start: int) -> None:
        if role == "key":
            if not torch.equal(source.table.inv_freq, preferred[source.index].layer.inv_freq):
                raise ValueError(f"layer {source.index} was captured with another table: pass the captured model")
            preferred[source.index].add(states, ids, row, start)

    stream(model, rows, visit, chunk=chunk, layers=[layer.index for layer in chosen])
    return tuple(preferred[layer.index].result() for layer in chosen)


class _Preferred:
    """The keys of a layer with the largest logits."""

    def __init__(self, layer: LayerCapture, top: int) -> None:
        self.layer, self.top = layer, top
        self.target = query_over_distances(layer)
        heads, head_dim = layer.query.heads, layer.query.mean.shape[1]
        self.count = 0
        self.sum, self.squares = torch.zeros(2, heads, dtype=torch.float64)
        self.logit = torch.zeros(heads, 0, dtype=torch.float64)
        self.at = torch.empty(3, heads, 0, dtype=torch.long)
        self.key = torch.empty(heads, 0, head_dim, dtype=torch.float64)

    def add(self, states: Tensor, ids: Tensor, row: int, start: int) -> None:
        layer = self.layer
        if states.shape[1:] != layer.key.mean.shape:
            raise ValueError(
                f"layer {layer.index} was captured with keys of shape {tuple(layer.key.mean.shape)}, this model has "
                f"{tuple(states.shape[1:])}: pass the captured model"
            )
        own = states.cpu().double().repeat_interleave(layer.groups, dim=1).transpose(0, 1)  # heads, tokens, head_dim
        logits = torch.einsum("htd,hd->ht", own, self.target)
        self.count += len(states)
        # Around the first key's logit: sums of squares of large offsets would lose the digits that differ.
        if self.count == len(states):
            self.offset = logits[:, 0].clone()
        off = logits - self.offset[:, None]
        self.sum += off.sum(1)
        self.squares += off.square().sum(1)
        largest, at = logits.topk(min(self.top, len(states)))
        new = own.gather(1, at[..., None].expand(-1, -1, own.shape[-1]))
        place = torch.stack((torch.full_like(at, row), at + start, ids[at]))
        self.logit, keep = torch.cat((self.logit, largest), 1).sort(dim=1, descending=True)
        self.logit, keep = self.logit[:, : self.top], keep[:, : self.top]
        self.at = torch.cat((self.at, place), 2).gather(2, keep.expand(3, -1, -1))
        indices = keep[..., None].expand(-1, -1, own.shape[-1])
        self.key = torch.cat((self.key, new), 1).gather(1, indices)

    def result(self) -> Sinks:
        layer = self.layer
        mean = self.sum / self.count
        deviation = (self.squares / self.count - mean.square()).clamp_min(0).sqrt()
        above = self.logit - (mean + self.offset)[:, None]
        rounding = 1e-6 * self.logit.abs().amax(1)  # keys are float32
        safe = deviation.masked_fill(deviation <= rounding, math.inf)[:, None]
        row, position, token = self.at
        query = layer.query
        pairs, interleaved = query.pairs, query.interleaved
        return Sinks(
            layer=layer.index,
            position=position,
            token=token,
            row=row,
            logit=self.logit,
            score=above / safe,
            key=self.key,
            alignment=_cosine(pairs_of(self.key, pairs, interleaved), query.mean_pairs[:, None]),
            cosine=_cosine(self.key, query.mean[:, None]),
            pairs=pairs,
            interleaved=interleaved,
        )


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    lengths = a.norm(dim=-1) * b.norm(dim=-1)
    return torch.where(lengths > 0, (a * b).sum(-1) / lengths.masked_fill(lengths == 0, 1.0), 0.0)
