"""The shapes of a model that its memory follows from, as plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Linear:
    """One projection of a layer. Those with the same ``place`` read the same input."""

    name: str  # such as "q_proj"
    inputs: int
    outputs: int
    place: str  # "attention" (q, k, v), "attention_out", "mlp" (gate, up) or "mlp_out"


@dataclass(frozen=True)
class Layer:
    """One decoder layer; every width is in features per token."""

    hidden: int
    query: int  # heads x head_dim
    key: int  # KV heads x head_dim; values are as wide
    heads: int
    ffn: int
    window: int | None  # greatest number of keys that a query sees; None if it sees all before it
    norms: int  # widths of what all norms read, together
    linears: tuple[Linear, ...]  # the output projection of the MLP is the last

    @property
    def matmul_weights(self) -> int:
        """Number of entries of all projections."""
        return sum(x.inputs * x.outputs for x in self.linears)


@dataclass(frozen=True)
class Shape:
    """The numbers of a model that a plan follows from."""

    name: str
    parameters: int  # tied weights count once
    outside_layers: int  # those of embeddings, last norm and head
    kinds: dict[Layer, int]  # the different layers, each with the number of times that it occurs
    vocab: int
    hidden: int  # width of the residual stream
    sdpa: bool
    capped_logits: bool

    def total(self, of: Callable[[Layer], int]) -> int:
        """Return the sum of a function of a layer over all layers."""
        return sum(of(layer) * count for layer, count in self.kinds.items())
