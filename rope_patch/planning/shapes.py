"""The shapes of a model that its memory follows from, as plain numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Linear:
    """One projection of a layer. Those with the same ``place`` read the same input."""

    name: str
    inputs: int
    outputs: int
    place: str  # "attention" (q, k, v), "attention_out", "mlp" (gate, up) or "mlp_out"

    @property
    def weight(self) -> int:
        """Number of entries of the weight."""
        return self.inputs * self.outputs


@dataclass(frozen=True)
class Layer:
    """One decoder layer; every width is in features per token."""

    hidden: int
    query: int  # heads x head_dim
    key: int  # KV heads x head_dim; values are as wide
    heads: int
    ffn: int
    window: int | None  # greatest number of keys that a query sees; None if it sees all before it
    norm_inputs: tuple[int, ...]  # width of what each norm reads
    linears: tuple[Linear, ...]
    parameters: int

    @cached_property
    def matmul_weights(self) -> int:
        """Number of entries of all projections."""
        return sum(linear.weight for linear in self.linears)


@dataclass(frozen=True)
class Shape:
    """The numbers of a model that a plan follows from."""

    name: str
    parameters: int  # tied weights count once
    layers: tuple[Layer, ...]
    vocab: int
    sdpa: bool
    capped_logits: bool

    @property
    def hidden(self) -> int:
        """Width of the residual stream [features]."""
        return self.layers[0].hidden

    @cached_property
    def kinds(self) -> dict[Layer, int]:
        """The different layers, each with the number of times that it occurs."""
        return dict(Counter(self.layers))

    def total(self, of: Callable[[Layer], float]) -> float:
        """Return the sum of a function of a layer over all layers."""
        return sum(of(layer) * count for layer, count in self.kinds.items())
