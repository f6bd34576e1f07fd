"""Statistics of queries, keys and values before rotation, of every layer and head, computed in one forward pass.

Hooks are on the modules in which :mod:`rope_patch.modeling.attention_layers` has found the states. Only the decoder of
the model is run, so that no logits exist. Each state is reduced as soon as it appears, a slice of tokens at a time, so
the memory does not grow with the text.

The numbers are those of Jonasson (arXiv:2503.01832) and of Barbero et al. (arXiv:2410.06205, sec. 4): mean
vector, mean norm and circular deviation of each rotary pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rope_patch.methods.already_scaled import context_reached
from rope_patch.modeling.attention_layers import AttentionLayer, split_pairs
from rope_patch.modeling.attention_probe import ROLES
from rope_patch.modeling.inputs import tensor_hash, token_rows
from rope_patch.modeling.state_statistics import Capture, LayerCapture, Statistics
from rope_patch.modeling.visit_states import visit_states
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
    if texts is None:
        texts = [0] * len(rows)
    tokens = torch.bincount(torch.tensor(texts)) * rows.shape[1]
    sums: dict[tuple[int, str], _StateSums] = {}

    def visit(layer: AttentionLayer, role: str, states: Tensor, row: int, start: int) -> None:
        state_sums = sums.get((layer.index, role))
        if state_sums is None:
            state_sums = sums[layer.index, role] = _StateSums(layer, role, states, tokens)
        state_sums.add(states, row, start, texts[row])

    read = visit_states(model, rows, visit)
    captured = [_layer_capture(layer, {role: sums[layer.index, role] for role in ROLES}) for layer in read]
    name = type(locate(model).model).__name__
    return Capture(name, rows.numel(), len(rows), tensor_hash(rows)[:16], tuple(captured))


def device_of_sums(device: torch.device) -> torch.device:
    """Return the device of sums in float64: that of what is added up, where nobody waits, if it has float64."""
    return device if device.type in ("cpu", "cuda") else torch.device("cpu")


class _StateSums:
    """Running sums over the states of one role of a layer, in float32 within a slice of tokens and float64 across them.

    Args:
        layer: the attention layer.
        role: ``"query"``, ``"key"`` or ``"value"``.
        states: (tokens, heads, head_dim) first states, from which shapes and device are taken.
        tokens: (texts,) number of tokens that will be read of each text.
    """

    def __init__(self, layer: AttentionLayer, role: str, states: Tensor, tokens: Tensor) -> None:
        self.layer = layer
        self.role = role
        self.pairs = layer.table.pairs
        heads, head_dim = states.shape[1:]
        self.device = device_of_sums(states.device)
        self.tokens = tokens
        self.largest = torch.zeros_like(states[0])
        self.sum = self._zeros(heads, head_dim)
        self.norm_sum = self._zeros(len(tokens), heads, self.pairs)
        self.unit_sum = self._zeros(2, heads, self.pairs)
        self.directed = self._zeros(heads, self.pairs)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float64, device=self.device)

    def _sum(self, values: Tensor) -> Tensor:
        """Return the sum over tokens."""
        return values.sum(0).to(self.device).double()

    def add(self, states: Tensor, row: int, start: int, text: int) -> None:
        """Add the states of a slice of tokens.

        Args:
            states: (tokens, heads, head_dim) float32 states.
            row: index of the text, for errors.
            start: position of the first token [tokens].
            text: number of the text of the row.
        """
        largest = states.abs().amax(0)
        if not float(largest.max()) < LARGEST_STATE:  # also true for NaN
            self._refuse(states, row, start)
        self.largest = torch.maximum(self.largest, largest)
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

    def _refuse(self, states: Tensor, row: int, start: int) -> None:
        token, head, feature = (~(states.abs() < LARGEST_STATE)).nonzero()[0].tolist()
        at = f"position {start + token}"
        if row:
            at += f" of row {row}"
        value = float(states[token, head, feature])
        raise ValueError(
            f"layer {self.layer.index}, {self.role} head {head}, feature {feature} is {value} at {at}: "
            f"statistics need finite states below {LARGEST_STATE:g}"
        )

    def result(self) -> Statistics:
        """Return the statistics."""
        # Rounding can make a mean of unit vectors longer than 1.
        length = torch.hypot(*(self.unit_sum / self.directed.clamp_min(1))).clamp(0, 1)
        count = int(self.tokens.sum())
        norms = self.norm_sum.cpu()
        return Statistics(
            mean=(self.sum / count).cpu(),
            mean_norm=norms.sum(0) / count,
            largest=self.largest.cpu().double(),
            text_norm=(norms / self.tokens[:, None, None]).transpose(0, 1),
            circular_deviation=(-2 * length.log()).clamp_min(0).sqrt().cpu(),
            interleaved=self.layer.interleaved,
        )


def _layer_capture(layer: AttentionLayer, sums: Mapping[str, _StateSums]) -> LayerCapture:
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
        query=sums["query"].result(),
        key=sums["key"].result(),
        value=sums["value"].result(),
    )
