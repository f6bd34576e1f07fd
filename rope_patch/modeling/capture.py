"""Statistics of queries, keys and values before rotation, of every layer and head, computed in one forward pass.

Hooks are on the modules in which :mod:`rope_patch.modeling.attention_layers` has found the states. Only the decoder of
the model is run, so that no logits exist. Each state is reduced as soon as it appears, a slice of tokens at a time, so
the memory does not grow with the text.

The numbers are those of Jonasson (arXiv:2503.01832) and of Barbero et al. (arXiv:2410.06205, sec. 4): mean
vector, mean norm and circular deviation of each rotary pair.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from rope_patch.methods.already_scaled import context_reached
from rope_patch.modeling.attention_layers import AttentionLayer, find_attention_layers, split_pairs
from rope_patch.modeling.attention_probe import ROLES
from rope_patch.modeling.devices import device_of_sums, on_cpu
from rope_patch.modeling.inputs import tensor_hash, token_rows
from rope_patch.modeling.state_statistics import Capture, LayerCapture, Statistics
from rope_patch.modeling.visit_states import run_decoder, visiting_states
from rope_patch.patching.locate import locate

LARGEST_STATE = 1e18
"""States of this size or more are refused, as infinite ones are: their squares leave the range of float32."""


def capture(
    model: nn.Module,
    token_ids: Tensor,
    *,
    texts: Sequence[int] | None = None,
) -> Capture:
    """Measure a model's queries, keys and values before rotation on a text.

    Layers, heads and layouts are found by measurement, see :mod:`rope_patch.modeling.attention_layers`; attention runs
    through whatever implementation the model uses. Meanwhile the model is in eval mode; it is left as it was.

    Args:
        model: a causal language model of transformers, patched or not, bare or under a LoRA adapter.
        token_ids: (tokens,) or (rows, tokens) token ids, at least 2 in a row; rows are separate texts, read one by one.
        texts: number of the text of each row, from 0 on, where mean norms are wanted by text; by default all rows are
            of one text.

    Returns:
        The statistics.

    Raises:
        TypeError: it is not a model of transformers.
        ValueError: there are fewer than 2 tokens, or ids that the model does not know; it has no rotary table; its
            states cannot be found (see ``find_attention_layers``); or states are NaN or infinite, which the message
            names with their positions.
    """
    rows = token_rows(token_ids)
    with capturing(find_attention_layers(model), rows, texts) as sums:
        run_decoder(model, rows)
    return sums.result(model)


class CaptureSums:
    """The sums of a capture, see :func:`capturing`.

    Args:
        layers: the attention layers.
        rows: (rows, tokens) the texts that are read.
        texts: number of the text of each row.
    """

    def __init__(self, layers: Sequence[AttentionLayer], rows: Tensor, texts: Sequence[int]) -> None:
        self.layers = layers
        self.rows = rows
        self.texts = texts
        self.tokens = torch.bincount(torch.tensor(texts)) * rows.shape[1]
        self.sums: dict[tuple[int, str], _StateSums] = {}

    def visit(self, layer: AttentionLayer, role: str, states: Tensor, before: int) -> None:
        """Add states, see :data:`~rope_patch.modeling.visit_states.Visit`."""
        state_sums = self.sums.get((layer.index, role))
        if state_sums is None:
            state_sums = self.sums[layer.index, role] = _StateSums(layer, states, len(self.tokens))
        state_sums.add(states, self.texts[before // self.rows.shape[1]])

    def result(self, model: nn.Module) -> Capture:
        """Return the statistics, after waiting for a GPU once for each data type.

        Raises:
            ValueError: states are NaN or infinite.
        """
        found = on_cpu({at: sums.tensors() for at, sums in self.sums.items()})
        statistics: dict[tuple[int, str], Statistics] = {}
        for at, sums in self.sums.items():
            _check_finite(*at, found[at][0])
            statistics[at] = sums.result(found[at], self.tokens)
        layers = tuple(
            _layer_capture(layer, {role: statistics[layer.index, role] for role in ROLES}) for layer in self.layers
        )
        name = type(locate(model).model).__name__
        return Capture(name, self.rows.numel(), len(self.rows), tensor_hash(self.rows)[:16], layers)


def _check_finite(index: int, role: str, largest: Tensor) -> None:
    bad = ~(largest < LARGEST_STATE)  # also true for NaN
    if bool(bad.any()):
        head, feature = bad.nonzero()[0].tolist()
        raise ValueError(
            f"layer {index}, {role} head {head}, feature {feature} is of size {float(largest[head, feature])}: "
            f"statistics need finite states below {LARGEST_STATE:g}"
        )


@contextlib.contextmanager
def capturing(
    layers: Sequence[AttentionLayer], rows: Tensor, texts: Sequence[int] | None = None
) -> Iterator[CaptureSums]:
    """Take the statistics of queries, keys and values while a model reads rows of text in a ``with`` block, in order.

    Args:
        layers: attention layers of the model, as ``find_attention_layers`` returns them.
        rows: (rows, tokens) the token ids that are read.
        texts: number of the text of each row, as for :func:`capture`.
    """
    sums = CaptureSums(layers, rows, [0] * len(rows) if texts is None else texts)
    with visiting_states(layers, sums.visit, rows.numel()):
        yield sums


class _StateSums:
    """Running sums over the states of one role of a layer, in float32 within a slice of tokens and float64 across them.

    Args:
        layer: the attention layer.
        states: (tokens, heads, head_dim) first states, from which shapes and device are taken.
        texts: number of texts.
    """

    def __init__(self, layer: AttentionLayer, states: Tensor, texts: int) -> None:
        self.layer = layer
        self.pairs = layer.table.pairs
        heads, head_dim = states.shape[1:]
        self.device = device_of_sums(states.device)
        self.largest = torch.zeros_like(states[0])
        self.sum = self._zeros(heads, head_dim)
        self.norm_sum = self._zeros(texts, heads, self.pairs)
        self.unit_sum = self._zeros(2, heads, self.pairs)
        self.directed = self._zeros(heads, self.pairs)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float64, device=self.device)

    def _sum(self, values: Tensor) -> Tensor:
        """Return the sum over tokens."""
        return values.sum(0).to(self.device).double()

    def add(self, states: Tensor, text: int) -> None:
        """Add the states of a slice of tokens.

        Args:
            states: (tokens, heads, head_dim) float32 states.
            text: number of the text.
        """
        self.largest = torch.maximum(self.largest, states.abs().amax(0))  # NaN stays
        self.sum += self._sum(states)
        first, second = split_pairs(states, self.pairs, self.layer.interleaved)
        norms = (first * first).addcmul_(second, second).sqrt_()
        self.norm_sum[text] += self._sum(norms)
        # Zero vectors have no direction: they are neither counted nor divided by their norm.
        zero = norms == 0
        self.directed += self._sum(~zero)
        norms = norms.masked_fill(zero, 1.0)
        self.unit_sum[0] += self._sum(first / norms)
        self.unit_sum[1] += self._sum(second / norms)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the sums, where they are, as :meth:`result` takes them."""
        return self.largest, self.sum, self.norm_sum, self.unit_sum, self.directed

    def result(self, sums: Sequence[Tensor], tokens: Tensor) -> Statistics:
        """Return the statistics of sums on the CPU, over so many tokens of each text (texts,)."""
        largest, total, norms, units, directed = sums
        # Rounding can make a mean of unit vectors longer than 1.
        length = torch.hypot(*(units / directed.clamp_min(1))).clamp(0, 1)
        count = int(tokens.sum())
        return Statistics(
            mean=total / count,
            mean_norm=norms.sum(0) / count,
            largest=largest.double(),
            text_norm=(norms / tokens[:, None, None]).transpose(0, 1),
            circular_deviation=(-2 * length.log()).clamp_min(0).sqrt(),
            interleaved=self.layer.interleaved,
        )


def _layer_capture(layer: AttentionLayer, statistics: Mapping[str, Statistics]) -> LayerCapture:
    table = layer.table
    context = context_reached(table)
    if layer.window is not None:
        context = min(context, layer.window)
    return LayerCapture(
        index=layer.index,
        layer_type=table.layer_type,
        inv_freq=table.inv_freq,
        attention_scaling=table.attention_scaling,
        context=context,
        scaling=layer.scaling,
        softcap=layer.softcap,
        keys_of=layer.keys_of,
        query=statistics["query"],
        key=statistics["key"],
        value=statistics["value"],
    )
