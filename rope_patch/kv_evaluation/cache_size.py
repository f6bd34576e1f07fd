"""The size of a quantized cache for one text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rope_patch.kv_cache.formats import FULL_BITS
from rope_patch.kv_cache.plans import LayerPlan, plan_layers
from rope_patch.kv_cache.schemes import Scheme
from rope_patch.modeling.attention_layers import AttentionLayer
from rope_patch.modeling.state_statistics import Capture

Heads = Mapping[str, Sequence[int]]
"""The number of heads, and of features of a head, by ``"keys"`` and ``"values"``."""


@dataclass(frozen=True, eq=False)
class StoredStates:
    """The keys or the values that one layer stores.

    Attributes:
        plan: the plan of the layer.
        name: ``"keys"`` or ``"values"``.
        features: number of features of a token, all heads together.
        bits: bits per element of the quantized part, with scales and zero points.
    """

    plan: LayerPlan
    name: str
    features: int
    bits: float

    def elements(self, length: int) -> int:
        """Return the number of elements of a text: sliding layers hold only their window."""
        return self.features * min(length, self.plan.layer.window or length)

    def size(self, length: int) -> float:
        """Return the size of the states of a text [bits]; sinks, residual and unfinished blocks are not quantized."""
        scheme = self.plan.scheme
        stored = min(length, self.plan.layer.window or length)
        end = self.plan.frozen(self.name, length + bool(scheme.flush))  # with `flush` as the next query reads the cache
        rounded = max(0, end - max(scheme.sinks, length - stored))
        return self.features * (self.bits * rounded + FULL_BITS * (stored - rounded))


def heads_of(capture: Capture) -> dict[int, Heads]:
    """Return the heads of every layer with keys of its own, as the statistics of keys and values have them."""
    own = [layer for layer in capture.layers if layer.keys_of == layer.index]
    return {layer.index: {"keys": layer.key.mean.shape, "values": layer.value.mean.shape} for layer in own}


def stored_states(layers: Sequence[AttentionLayer], heads: Mapping[int, Heads], scheme: Scheme) -> list[StoredStates]:
    """Return what the layers of a model store under a scheme.

    Args:
        layers: the attention layers of the model.
        heads: the heads of every layer that stores keys and values, by its index.
        scheme: the scheme.
    """
    plans = plan_layers(layers, scheme)
    stored = []
    for index, states in heads.items():
        for name, (count, width) in states.items():
            stored.append(StoredStates(plans[index], name, count * width, plans[index].bits(name, width)))
    return stored


def cache_bits(stored: Sequence[StoredStates], length: int) -> float:
    """Return the mean number of bits of an element of a whole cache of some length [tokens]."""
    return sum(states.size(length) for states in stored) / sum(states.elements(length) for states in stored)


def token_bytes(stored: Sequence[StoredStates]) -> float:
    """Return the size that each token adds to a long cache [bytes]: to layers without a window."""
    return sum(states.features * states.bits for states in stored if states.plan.layer.window is None) / 8
