"""The shapes that memory follows from: plain numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Linear:
    """One projection of a layer. ``place`` says what its input is shared with."""

    name: str
    inputs: int
    outputs: int
    place: str  # "attention" (q, k, v), "attention_out", "mlp" (gate, up) or "mlp_out"

    @property
    def weight(self) -> int:
        """Entries of the weight."""
        return self.inputs * self.outputs


@dataclass(frozen=True)
class Layer:
    """One decoder layer; every width in features per token."""

    hidden: int
    query: int  # heads x head_dim
    key: int  # KV heads x head_dim; values are as wide
    heads: int
    ffn: int
    window: int | None  # keys a query sees at most; None for all before it
    norm_inputs: tuple[int, ...]  # what each norm reads
    linears: tuple[Linear, ...]
    parameters: int

    @cached_property
    def matmul_weights(self) -> int:
        """Entries of all projections."""
        return sum(linear.weight for linear in self.linears)


@dataclass(frozen=True)
class Shape:
    """What a plan needs to know of a model."""

    name: str
    parameters: int  # tied weights once
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
        """The different layers, and how many there are of each."""
        return dict(Counter(self.layers))

    def total(self, of: Callable[[Layer], float]) -> float:
        """Return the sum of something over the layers."""
        return sum(of(layer) * count for layer, count in self.kinds.items())
