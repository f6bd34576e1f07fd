"""How a model is to be trained: everything a plan depends on beside its shapes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rope_patch.options.plan import ALL_LINEAR as ALL_LINEAR
from rope_patch.options.plan import StepOptions
from rope_patch.planning.shapes import Layer, Linear, Shape
from rope_patch.runtime.text import did_you_mean

ELEMENT = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes per entry."""


@dataclass(frozen=True, kw_only=True)
class TrainingStep(StepOptions):
    """One way to train, and what a model of some shape makes of it."""

    @property
    def element(self) -> int:
        """Bytes per entry of weights and activations."""
        return ELEMENT[self.dtype]

    @property
    def tokens(self) -> float:
        """Tokens whose activations one GPU holds."""
        return self.batch * self.length / self.context_parallel

    def targets(self, layer: Layer) -> tuple[Linear, ...]:
        """Return the projections of a layer that carry an adapter."""
        if self.lora_rank is None:
            return ()
        names = set(self.target_modules)
        return tuple(x for x in layer.linears if ALL_LINEAR in names or x.name.rpartition(".")[2] in names)

    def check(self, shape: Shape) -> None:
        """Raise where a model cannot be trained so."""
        known = sorted({x.name.rpartition(".")[2] for layer in shape.kinds for x in layer.linears})
        for name in self.target_modules:
            if name not in (*known, ALL_LINEAR):
                raise ValueError(_unknown_target(name, known, shape))
        if self.attention == "sdpa" and not shape.sdpa:
            raise ValueError(f"{shape.model_class} has no sdpa attention in transformers: take flash or eager")


def _unknown_target(name: str, known: Iterable[str], shape: Shape) -> str:
    hint = f"{did_you_mean(name, known)} Known: {ALL_LINEAR}, {', '.join(known)}"
    return f"target_modules name {name!r} matches no projection of {shape.name}.{hint}"
