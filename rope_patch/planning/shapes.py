"""The shapes that memory follows from: plain numbers, so that nothing here imports torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Linear:
    """One projection of a layer. ``place`` says what its input is shared with."""

    name: str
    inputs: int
    outputs: int
    bias: bool
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
    norm_weights: int
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
    model_class: str
    parameters: int  # tied weights once
    layers: tuple[Layer, ...]
    embedding: int  # entries of the token embedding
    head: int  # entries of the output projection
    tied: bool
    vocab: int
    norm_weights: int  # of all norms, the last one too
    norms_in_float32: bool  # Gemma's norms multiply by their weight before they round, others after
    sdpa: bool
    capped_attention: bool  # tanh on attention scores
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

    def to_dict(self) -> dict[str, Any]:
        """Return the shape for JSON: its different layers once, and for each layer which of them it is."""
        kinds = list(self.kinds)
        layers = [asdict(kind) | {"linears": [list(asdict(x).values()) for x in kind.linears]} for kind in kinds]
        return asdict(self) | {"kinds": layers, "layers": [kinds.index(layer) for layer in self.layers]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Shape:
        """Return the shape that :meth:`to_dict` wrote.

        >>> layer = Layer(8, 8, 4, 2, 16, None, (8, 8), 16, (Linear("q_proj", 8, 8, False, "attention"),), 80)
        >>> shape = Shape("tiny", "Tiny", 200, (layer, layer), 40, 40, False, 5, 40, False, True, False, False)
        >>> Shape.from_dict(shape.to_dict()) == shape
        True
        """
        kinds = [
            Layer(
                **kind
                | {"norm_inputs": tuple(kind["norm_inputs"]), "linears": tuple(Linear(*x) for x in kind["linears"])}
            )
            for kind in data["kinds"]
        ]
        rest = {key: value for key, value in data.items() if key != "kinds"}
        return cls(**rest | {"layers": tuple(kinds[index] for index in data["layers"])})
