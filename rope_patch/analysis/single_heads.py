"""One head in detail: its attention, the norms of its pairs token by token, and what each adds to a logit.

*Source*: Barbero et al., arXiv:2410.06205, figures 5-7 and 14-18 and sec. E.1.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from rope_patch.analysis.heads import FIRST_COUNTED_QUERY, OFFSETS
from rope_patch.modeling.attention_layers import AttentionLayer, rotate
from rope_patch.modeling.devices import on_cpu
from rope_patch.modeling.inputs import token_rows
from rope_patch.modeling.state_statistics import pairs_of
from rope_patch.modeling.visit_states import run_decoder, visiting_states

SHOWN_TOKENS = 256
"""Number of tokens that figures show a head on."""


@dataclass(frozen=True, eq=False)
class SingleHead:
    """The states of one head on a text or on rows of text. Tensors are float64 on the CPU.

    Attributes:
        layer: the index of the layer.
        head: the index of the query head.
        token_ids: (tokens,) or (rows, tokens) the token ids of the text.
        query: (..., tokens, head_dim) the queries before rotation.
        key: (..., tokens, head_dim) the keys before rotation.
        inv_freq: (pairs,) the table in use [rad/token].
        attention_scaling: the attention factor, by which cos and sin are multiplied.
        scaling: the factor on q·k, usually ``1 / sqrt(head_dim)``.
        softcap: the bound that soft-capping puts on the scaled logits; None where the model has none.
        window: the number of tokens that a query sees; None for all [tokens].
        sink: the logit of the head that has no key, as gpt-oss learns it; None where the model has none.
        interleaved: whether the two features of a pair are neighbours, instead of half the rotary dimension apart.
    """

    layer: int
    head: int
    token_ids: Tensor
    query: Tensor
    key: Tensor
    inv_freq: Tensor
    attention_scaling: float
    scaling: float
    softcap: float | None
    window: int | None
    sink: float | None
    interleaved: bool

    @functools.cached_property
    def shown(self) -> SingleHead:
        """The head on the first tokens of the first row."""
        ids, query, key = (rows[0, :SHOWN_TOKENS] for rows in (self.token_ids, self.query, self.key))
        return replace(self, token_ids=ids, query=query, key=key)

    def norms(self, states: Tensor) -> Tensor:
        """Return the 2-norm of each pair of the queries or keys: (..., tokens, pairs)."""
        norms: Tensor = torch.linalg.vector_norm(self.pairs(states), dim=-1)
        return norms

    @functools.cached_property
    def logits(self) -> Tensor:
        """Scaled logits of one text before soft-capping, future keys included: (queries, keys)."""
        query, key = self._rotated
        return query @ key.T * self.scaling

    @property
    def near_logits(self) -> Tensor:
        """Scaled logits of each token with the keys at distances 0 to 7, before soft-capping; nan where there is none.

        (..., tokens, 8).
        """
        query, key = self._rotated
        logits = torch.full((*query.shape[:-1], OFFSETS), math.nan, dtype=query.dtype)
        tokens = query.shape[-2]
        for distance in range(min(OFFSETS, tokens)):
            seen = key[..., : tokens - distance, :]
            logits[..., distance:, distance] = torch.linalg.vecdot(query[..., distance:, :], seen) * self.scaling
        return logits

    @functools.cached_property
    def pattern(self) -> Tensor:
        """Attention weights: (queries, keys), each query's summing to 1 over what it sees and a learned sink."""
        capped = self.logits
        if self.softcap is not None:
            capped = self.softcap * torch.tanh(capped / self.softcap)
        places = torch.arange(len(capped))
        distance = places[:, None] - places
        hidden = (distance < 0) | (distance >= (self.window or len(capped)))
        capped = capped.masked_fill(hidden, -torch.inf)
        total = capped.logsumexp(-1, keepdim=True)
        if self.sink is not None:
            total = torch.logaddexp(total, torch.full_like(total, self.sink))
        return (capped - total).exp()

    def mean_terms(self, distance: int) -> Tensor:
        """Return what each pair adds to the scaled logit at a distance, averaged over the text: (pairs,)."""
        query, key = self._rotated
        return self._terms(query[distance:] * key[: len(key) - distance])

    def sink_terms(self) -> tuple[Tensor, Tensor]:
        """Return what each pair adds to the scaled logit with the first key, and with the mean of those after it.

        They are means over the queries that see the first key, from ``FIRST_COUNTED_QUERY`` on: (pairs,) each.
        """
        query, key = self._rotated
        seeing = slice(min(FIRST_COUNTED_QUERY, len(key) - 1), self.window)
        others = (key.cumsum(0) - key[0]) / torch.arange(len(key)).clamp_min(1)[:, None]
        return self._terms(query[seeing] * key[0]), self._terms((query * others)[seeing])

    def _terms(self, products: Tensor) -> Tensor:
        """The sum over both features of a pair, averaged over tokens."""
        return self.pairs(products).sum(-1).mean(0) * self.scaling

    def pairs(self, states: Tensor) -> Tensor:
        """Return the queries or keys as pairs: (..., tokens, pairs, 2)."""
        return pairs_of(states, len(self.inv_freq), self.interleaved)

    @functools.cached_property
    def _rotated(self) -> tuple[Tensor, Tensor]:
        """Queries and keys as attention sees them: (..., tokens, head_dim) each."""
        angles = torch.arange(self.query.shape[-2])[:, None] * self.inv_freq.double()
        cos = angles.cos() * self.attention_scaling
        sin = angles.sin() * self.attention_scaling
        return rotate(self.query, cos, sin, self.interleaved), rotate(self.key, cos, sin, self.interleaved)


def read_single_heads(
    model: nn.Module, token_ids: Tensor, heads: Sequence[tuple[int, int]], layers: Sequence[AttentionLayer]
) -> tuple[SingleHead, ...]:
    """Take single heads out of one forward pass of their own, see :func:`reading_single_heads`.

    Args:
        model: a causal language model, as for :func:`~rope_patch.modeling.capture.capture`.
        token_ids: (tokens,) or (rows, tokens) the token ids of the text, 2 tokens or more.
        heads: the layer and query head of each head, which the model has.
        layers: the attention layers of the model.

    Returns:
        A view of each, in the order asked for.
    """
    with reading_single_heads(token_ids, heads, layers) as views:
        run_decoder(model, token_rows(token_ids))
    return views()


@contextlib.contextmanager
def reading_single_heads(
    token_ids: Tensor, heads: Sequence[tuple[int, int]], layers: Sequence[AttentionLayer]
) -> Iterator[Callable[[], tuple[SingleHead, ...]]]:
    """Take single heads out of a pass over a text in a ``with`` block; a function returns them after it.

    Args:
        token_ids: (tokens,) or (rows, tokens) the token ids of the text that is read, one row at a time.
        heads: the layer and query head of each head, which the model has.
        layers: the attention layers of the model.
    """
    wanted = {layer.index: layer for layer in layers if layer.index in {index for index, _ in heads}}
    heads_of = {index: sorted({head for at, head in heads if at == index}) for index in wanted}
    captured: dict[tuple[int, str], list[Tensor]] = defaultdict(list)
    counts = {}

    def visit(layer: AttentionLayer, role: str, states: Tensor, before: int) -> None:
        if role == "query":
            counts[layer.index] = states.shape[1]
            states = states[:, heads_of[layer.index]]
        if role != "value":
            captured[layer.index, role].append(states)

    def views() -> tuple[SingleHead, ...]:
        """Return a view of each head, in the order asked for."""
        whole = {at: torch.cat(states).double() for at, states in on_cpu(captured).items()}
        single_heads = []
        for index, head in heads:
            layer = wanted[index]
            query, keys = whole[index, "query"], whole[index, "key"]
            query = query[:, heads_of[index].index(head)]
            # Under grouped-query attention, neighbouring query heads share a key head.
            key = keys[:, head * keys.shape[1] // counts[index]]
            single_heads.append(
                SingleHead(
                    layer=index,
                    head=head,
                    token_ids=token_ids,
                    query=query.reshape(*token_ids.shape, -1),
                    key=key.reshape(*token_ids.shape, -1),
                    inv_freq=layer.table.inv_freq,
                    attention_scaling=layer.table.attention_scaling,
                    scaling=layer.scaling,
                    softcap=layer.softcap,
                    window=layer.window,
                    sink=None if layer.sinks is None else float(layer.sinks[head]),
                    interleaved=layer.interleaved,
                )
            )
        return tuple(single_heads)

    with visiting_states(list(wanted.values()), visit, token_ids.numel()):
        yield views
