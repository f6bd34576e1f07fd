"""Plan how a scheme quantizes each layer of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from rope_patch.kv_cache.blocks import at_least_float, fake_quantize
from rope_patch.kv_cache.schemes import Scheme, Side, effective_bits
from rope_patch.modeling.attention_layers import AttentionLayer, rotate, split_pairs
from rope_patch.runtime.captions import ranges_text

Tokens = TypeVar("Tokens", int, Tensor)

CosSin = tuple[Tensor, Tensor]
"""cos and sin of the pairs at the positions of some tokens: (rows, tokens, pairs) each."""


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """The plan of one layer of a model under a scheme.

    Attributes:
        layer: the attention layer, with the module that puts out its keys, its table and its window.
        scheme: the scheme of the whole model.
        sides: how the ``"keys"`` and ``"values"`` of this layer are quantized.
        offset: (heads, head_dim) part of keys before rotation, such as their bias, that is subtracted before they are
            rounded and added when they are read; None if nothing is.
        exact: (heads, head_dim) whether each feature of keys stays in full precision whatever the scheme says; None if
            none does.
        scales: what ``"keys"`` and ``"values"`` are divided by before they are rounded, and multiplied by when they
            are read; empty for 1.
    """

    layer: AttentionLayer
    scheme: Scheme
    sides: dict[str, Side]
    offset: Tensor | None = None
    exact: Tensor | None = None
    scales: Mapping[str, float] = field(default_factory=dict)

    @property
    def needs_cos_sin(self) -> bool:
        """Whether keys are quantized with the help of cos and sin at their positions."""
        return self.sides["keys"].pre or self.offset is not None

    def frozen(self, name: str, visible_tokens: Tokens) -> Tokens:
        """Return the position at which the quantized tokens that a query reads end; they begin after the sinks.

        Args:
            name: ``"keys"`` or ``"values"``.
            visible_tokens: number of tokens that the query sees, its own included; several queries as a tensor.
        """
        scheme = self.scheme
        base = scheme.sinks
        # With `flush` a query reads the cache before its own token rounds anything, hence the 1.
        if not scheme.flush:
            count = visible_tokens - base - scheme.residual
        elif name == "keys" or not scheme.residual:
            count = (visible_tokens - base - 1) // scheme.flush * scheme.flush
        else:
            count = visible_tokens - base - 1 - scheme.residual
        block = self.sides[name].block
        # A tensor has no `max(0, count)`: the comparison is 0 or 1 for a number and for a tensor.
        return base + (count > 0) * (count // block * block)

    def at_once(self, name: str) -> bool:
        """Return whether a query reads its own token quantized already, so that all queries read the same."""
        first = self.scheme.sinks + 1
        return self.frozen(name, first) == first

    def quantize(self, name: str, states: Tensor, cos_sin: CosSin | None) -> Tensor:
        """Return blocks of keys or values, (blocks, heads, tokens, head_dim), as they are read back.

        Args:
            name: ``"keys"`` or ``"values"``.
            states: the blocks; keys are rotated.
            cos_sin: cos and sin at the positions of the tokens, if :attr:`needs_cos_sin`; otherwise None.
        """
        side = self.sides[name]
        if name == "values" or (not self.needs_cos_sin and self.exact is None):
            return self._round(name, states)
        x = at_least_float(states)
        if side.pre:
            x = self._rotate(x, cos_sin, back=True)
        apart = torch.zeros_like(x)
        if self.offset is not None:
            apart += self.offset[:, None].to(x)
            if not side.pre:
                apart = self._rotate(apart, cos_sin)
        rest = x - apart
        if self.exact is None:
            x = self._round(name, rest) + apart
        else:
            # Exact features leave zeros behind, so that they stretch no scale.
            exact = self.exact[:, None].to(x.device)
            x = torch.where(exact, x, self._round(name, rest.masked_fill(exact, 0.0)) + apart)
        if side.pre:
            x = self._rotate(x, cos_sin)
        return x.to(states.dtype)

    def _round(self, name: str, x: Tensor) -> Tensor:
        """Round blocks to the formats of a side; features of keys that rotate may have one of their own."""
        side = self.sides[name]
        scale = self.scales.get(name)
        if scale is not None:
            unscaled = replace(self, scales={})
            return (unscaled._round(name, at_least_float(x) / scale) * scale).to(x.dtype)
        if side.rope is None:
            return fake_quantize(x, side)
        out = torch.empty_like(x)
        for part, features in zip(side.parts, self._features(x.shape[-1]), strict=True):
            features = features.to(x.device)
            out[..., features] = fake_quantize(x[..., features], part)
        return out

    def _features(self, width: int) -> tuple[Tensor, Tensor]:
        """Return the indices of the features of keys that do not rotate, and of those that do."""
        rotates = torch.zeros(width, dtype=torch.bool)
        for half in split_pairs(rotates, self.layer.table.pairs, self.layer.interleaved):
            half.copy_(self.layer.table.inv_freq != 0)
        return (~rotates).nonzero()[:, 0], rotates.nonzero()[:, 0]

    def bits(self, name: str, width: int) -> float:
        """Return the number of bits per element of the quantized part of keys or values, with scales and zero points.

        Args:
            name: ``"keys"`` or ``"values"``.
            width: number of features of a head.
        """
        side = self.sides[name]
        if side.rope is None:
            return effective_bits(side, width)
        sizes = zip(side.parts, map(len, self._features(width)), strict=True)
        return sum(effective_bits(part, size) * size for part, size in sizes if size) / width

    def _rotate(self, x: Tensor, cos_sin: CosSin | None, *, back: bool = False) -> Tensor:
        """Rotate keys as attention code does, or undo that; cos and sin contain the attention scaling.

        Args:
            x: (blocks, heads, tokens, head_dim) keys.
            cos_sin: cos and sin at the positions of the tokens.
            back: whether to undo the rotation.
        """
        assert cos_sin is not None
        cos, sin = (part[:, None, :, : self.layer.table.pairs].to(x.device, x.dtype) for part in cos_sin)
        if back:
            # The square of the attention scaling, as the rounded cos and sin have it: rotating again undoes this.
            size = cos.square() + sin.square()
            cos = cos / size
            sin = -sin / size
        return rotate(x, cos, sin, self.layer.interleaved)


def plan_layers(layers: Sequence[AttentionLayer], scheme: Scheme) -> dict[int, LayerPlan]:
    """Return the plan of each layer of a model under a scheme, by the index of the layer.

    Raises:
        ValueError: the scheme skips a layer that the model does not have, or has scales for one.
    """
    owners = {layer.index: layer.keys_of for layer in layers}
    skipped = {index if index >= 0 else max(owners) + 1 + index for index in scheme.skip}
    for index in skipped:
        if owners.get(index) != index:
            own = ranges_text([layer for layer, owner in owners.items() if layer == owner])
            raise ValueError(f"skip names layer {index}: the layers with keys of their own are {own}")
    scales = {layer: {"keys": of_keys, "values": of_values} for layer, of_keys, of_values in scheme.scales}
    if unknown := scales.keys() - owners.keys():
        raise ValueError(f"scales names layer {min(unknown)}: the layers that attend are {ranges_text(sorted(owners))}")
    plans = {}
    for layer in layers:
        sides = {"keys": scheme.key, "values": scheme.value}
        if layer.keys_of in skipped:
            sides = {"keys": Side(), "values": Side()}
        plans[layer.index] = LayerPlan(layer, scheme, sides, scales=scales.get(layer.keys_of, {}))
    return plans
