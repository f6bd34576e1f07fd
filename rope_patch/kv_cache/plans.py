"""What a scheme means for each layer of a model: which features are kept apart, which mean is subtracted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rope_patch import frequencies
from rope_patch.kv_cache.quantizers import at_least_float, fake_quantize, mix
from rope_patch.kv_cache.schemes import Scheme, Side
from rope_patch.modeling.capture import capture
from rope_patch.modeling.modes import in_eval_mode
from rope_patch.modeling.sources import Sources, find_sources, split_pairs
from rope_patch.patching.locate import locate

Tokens = TypeVar("Tokens", int, Tensor)
PROBE = 8
KEPT_IN_8 = Side("int8", "token", symmetric=True)

Turn = tuple[Tensor, Tensor]
"""cos and sin of the pairs at some tokens: (rows, tokens, pairs) each."""


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """One layer of a model under a scheme.

    Attributes:
        index: of the layer.
        keys_of: the layer whose keys and values it reads; its own index on most models.
        layer_type: of its table.
        key: how keys are quantized.
        value: how values are.
        residual: latest tokens in full precision [tokens].
        flush: keys that are quantized at a time, as :class:`~rope_patch.kv_cache.schemes.Scheme` says [tokens].
        sinks: first tokens in full precision [tokens].
        pairs: of the table.
        interleaved: layout of the pairs.
        softcap: of the scaled logits.
        window: tokens the layer sees; None for all.
        kept_features: (head_dim,) features kept apart in the bits of ``key.keep``, or None.
        exact: (head_dim,) features kept apart in full precision whatever the scheme says, or None.
        mean: (key heads, head_dim) subtracted from keys, before rotation under ``pre``; None without centring.
    """

    index: int
    keys_of: int
    layer_type: str | None
    key: Side
    value: Side
    residual: int
    flush: int
    sinks: int
    pairs: int
    interleaved: bool
    softcap: float | None
    window: int | None
    kept_features: Tensor | None = None
    exact: Tensor | None = None
    mean: Tensor | None = None

    @property
    def shifted(self) -> bool:
        """Whether all keys are stored less a constant that softmax drops."""
        return self.mean is not None and not self.key.pre

    def frozen(self, name: str, visible_tokens: Tokens, pad: int = 0) -> Tokens:
        """Return where the quantized tokens end that a query reads; they begin behind the sinks.

        Args:
            name: ``"key"`` or ``"value"``.
            visible_tokens: that the query sees, its own included.
            pad: tokens that its row is padded with on the left.
        """
        side, base = (self.key if name == "key" else self.value), self.sinks + pad
        if self.flush:
            waiting = visible_tokens - base - 1
            count = waiting // self.flush * self.flush if name == "key" else waiting - self.residual
        else:
            count = visible_tokens - base - self.residual
        return base + (count > 0) * (count // side.block * side.block)

    def shift(self, keys: Tensor) -> Tensor:
        """Return new keys (rows, heads, tokens, head_dim) as they are stored, sinks and residual included."""
        if self.mean is None or self.key.pre:
            return keys
        return keys - self.mean[:, None].to(keys.device, keys.dtype)

    def quantize_keys(self, keys: Tensor, turn: Turn | None) -> Tensor:
        """Return blocks of stored keys (blocks, heads, tokens, head_dim) as they are read back."""
        work = at_least_float(keys)
        if not self.key.pre:
            return self._round(work).to(keys.dtype)
        assert turn is not None
        plain = self._rotate(work, turn, back=True)
        if self.mean is None:
            plain = self._round(plain)
        else:
            mean = self.mean[:, None].to(plain.device, plain.dtype)
            plain = self._round(plain - mean) + mean
        return self._rotate(plain, turn).to(keys.dtype)

    def quantize_values(self, values: Tensor) -> Tensor:
        """Return blocks of values (blocks, heads, tokens, head_dim) as they are read back."""
        if self.value.hadamard:
            return mix(fake_quantize(mix(at_least_float(values)), self.value)).to(values.dtype)
        return fake_quantize(values, self.value)

    def _round(self, x: Tensor) -> Tensor:
        if self.key.hadamard:
            return mix(fake_quantize(mix(x), self.key))
        if self.kept_features is None and self.exact is None:
            return fake_quantize(x, self.key)
        none = torch.zeros(x.shape[-1], dtype=torch.bool)
        kept_features, exact = (
            (none if part is None else part).to(x.device) for part in (self.kept_features, self.exact)
        )
        out = x.clone()
        for features, side in ((~kept_features, self.key), (kept_features, KEPT_IN_8)):
            out[..., features & ~exact] = fake_quantize(x[..., features & ~exact], side)
        return out

    def _rotate(self, x: Tensor, turn: Turn, *, back: bool = False) -> Tensor:
        """Rotate keys as attention code does, or back; cos and sin carry the attention scaling."""
        cos, sin = (part[:, None, :, : self.pairs].to(x.device, x.dtype) for part in turn)
        if back:
            size = cos.square() + sin.square()  # the attention scaling squared, but for the rounding of cos and sin
            cos, sin = cos / size, -sin / size
        return _rotated(x, cos, sin, self.pairs, self.interleaved)


def plan_layers(
    model: nn.Module, scheme: Scheme, *, means: Mapping[int, Tensor] | None = None, context: int | None = None
) -> dict[int, LayerPlan]:
    """Return what a scheme means for each layer of a model.

    Args:
        model: a causal language model of transformers.
        scheme: to be planned.
        means: mean key before rotation by layer, (key heads, head_dim) each, from :func:`key_means`; needed to centre.
        context: distances of the frequency bound that outlier pairs lie under [tokens]; by default each layer's own.

    Raises:
        ValueError: a skipped layer that the model does not have, centring without means or under attention
            soft-capping, or a model whose keys cannot be found (see ``find_sources``).
    """
    sources = _sources(model)
    known = [layer.index for layer in sources.layers]
    owners = {layer.index: layer.keys_of for layer in sources.layers}
    for index in scheme.skip:
        if index not in known:
            raise ValueError(f"skip names layer {index}: the model has layers {known[0]} to {known[-1]}")
        if owners[index] != index:
            raise ValueError(f"skip names layer {index}, which reads the keys of layer {owners[index]}: name that one")
    plans = {}
    for layer in sources.layers:
        slot, table = layer.table, layer.table.inv_freq
        key, value = (Side(), Side()) if layer.keys_of in scheme.skip else (scheme.key, scheme.value)
        if key.centre and not key.pre and layer.softcap is not None:
            raise ValueError(
                f"layer {layer.index} caps its logits: subtracting a constant from keys would change them. "
                "Centre before rotation instead (.pre.centreall), where the mean is added again"
            )
        width = layer.parts["key"].head_dim
        mean = None
        if key.centre:
            if means is None or layer.keys_of not in means:
                raise ValueError("centring needs the mean keys of the model: pass means=key_means(model, token_ids)")
            mean = means[layer.keys_of].double()
            if not key.pre:
                turned = slot.attention_scaling * mean_turn(table, context or slot.max_position_embeddings)
                mean = _rotated(mean, turned.real, turned.imag, slot.pairs, layer.interleaved)
            if key.centre == "unrotated":
                mean = mean * features_of(frequencies.unrotated(table), width, layer.interleaved, rest=True)
        kept_features = None
        if key.keep:
            own = slot.max_position_embeddings if layer.window is None else layer.window
            size = own if context is None else context
            kept_features = features_of(table < frequencies.offset_frequency_bound(size), width, layer.interleaved)
        plans[layer.index] = LayerPlan(
            index=layer.index,
            keys_of=layer.keys_of,
            layer_type=slot.layer_type,
            key=key,
            value=value,
            residual=scheme.residual,
            flush=scheme.flush,
            sinks=scheme.sinks,
            pairs=slot.pairs,
            interleaved=layer.interleaved,
            softcap=layer.softcap,
            window=layer.window,
            kept_features=kept_features if kept_features is not None and bool(kept_features.any()) else None,
            mean=mean,
        )
    return plans


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, pairs: int, interleaved: bool) -> Tensor:
    """Rotate vectors (…, head_dim) pair by pair."""
    out = x.clone()
    first, second = split_pairs(x, pairs, interleaved)
    turned = split_pairs(out, pairs, interleaved)
    turned[0].copy_(first * cos - second * sin)
    turned[1].copy_(second * cos + first * sin)
    return out


def mean_turn(inv_freq: Tensor, tokens: int) -> Tensor:
    """Return the mean of a table's rotations over positions 0 to tokens - 1: (pairs,) complex128.

    1 for an unrotated pair, near 0 for one that makes full turns: what is left of a constant key once it is stored.
    """
    half = inv_freq.double() / 2
    size = torch.where(half == 0, 1.0, (tokens * half).sin() / (tokens * half.sin()))
    return torch.polar(torch.ones_like(half), (tokens - 1) * half) * size


def features_of(pairs: Tensor, head_dim: int, interleaved: bool, *, rest: bool = False) -> Tensor:
    """Return which features belong to marked pairs: (head_dim,) bool; ``rest`` marks unrotated ones too."""
    out = torch.full((head_dim,), rest)
    for half in split_pairs(out, len(pairs), interleaved):
        half.copy_(pairs)
    return out


@torch.no_grad()
def key_means(model: nn.Module, token_ids: Tensor) -> dict[int, Tensor]:
    """Return the mean key of each head before rotation over a text, by layer: (key heads, head_dim) float64.

    Args:
        model: a causal language model.
        token_ids: (tokens,) or (rows, tokens), from another text than is measured on.
    """
    return {layer.index: layer.key.mean for layer in capture(model, token_ids).layers}


def _sources(model: nn.Module) -> Sources:
    root: Any = locate(model).model
    size = root.get_input_embeddings().num_embeddings
    with in_eval_mode(model):
        return find_sources(model, torch.arange(PROBE) * max(1, size // (2 * PROBE)) % size)
