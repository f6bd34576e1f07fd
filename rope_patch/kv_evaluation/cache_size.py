"""The size of a quantized cache for one text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rope_patch.kv_cache.formats import FULL_BITS
from rope_patch.kv_cache.plans import LayerPlan, plan_layers
from rope_patch.kv_cache.schemes import Scheme
from rope_patch.modeling.attention_layers import AttentionLayer
from rope_patch.modeling.state_statistics import Capture


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


def stored_states(layers: Sequence[AttentionLayer], capture: Capture, scheme: Scheme) -> list[StoredStates]:
    """Return what the layers of a model store under a scheme; those that share the keys of another one store nothing.

    Args:
        layers: the attention layers of the model.
        capture: the statistics of its keys and values, which say how large they are.
        scheme: the scheme.
    """
    plans = plan_layers(layers, scheme)
    stored = []
    for layer in capture.layers:
        if layer.keys_of == layer.index and layer.index in plans:
            for name, states in (("keys", layer.key), ("values", layer.value)):
                plan = plans[layer.index]
                (heads, width) = states.mean.shape
                stored.append(StoredStates(plan, name, heads * width, plan.bits(name, width)))
    return stored


def cache_bits(stored: Sequence[StoredStates], length: int) -> float:
    """Return the mean number of bits of an element of a whole cache of some length [tokens]."""
    return sum(states.size(length) for states in stored) / sum(states.elements(length) for states in stored)


def token_bytes(stored: Sequence[StoredStates]) -> float:
    """Return the size that each token adds to a long cache [bytes]: to layers without a window."""
    return sum(states.features * states.bits for states in stored if states.plan.layer.window is None) / 8
