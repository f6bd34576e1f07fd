"""How a model is to be trained: everything a plan depends on beside its shapes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Literal, get_args, get_type_hints

from rope_patch.planning.shapes import Layer, Linear, Shape
from rope_patch.runtime.text import did_you_mean

ALL_LINEAR = "all-linear"
ELEMENT = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes per entry."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """One way to train.

    Args:
        length: of a sequence [tokens].
        batch: sequences per step, in each group of ``context_parallel`` GPUs.
        lora_rank: of the adapters; None trains every weight.
        target_modules: projections that get an adapter, by their last name, or ``("all-linear",)``.
        long_lora: train the embeddings and norms too, as LongLoRA does (arXiv:2309.12307, section 3.3).
        quantization: of the frozen projections: LLM.int8 or, double-quantized, NF4.
        optimizer: AdamW with float32 states, AdamW with 8-bit states, or SGD without momentum.
        checkpointing: keep only each layer's input and compute the layer again in the backward pass.
        loss: ``naive`` makes all logits at once, as plain transformers does; ``fused`` a slice at a time.
        attention: the kernel; ``sdpa`` needs a whole mask where windows slide, ``eager`` all scores.
        dtype: of weights and activations.
        gpus: weights, gradients and states are divided among them (FSDP, full shard).
        context_parallel: GPUs that share one sequence (ring attention or Ulysses); divides ``gpus``.

    Raises:
        ValueError: a value out of its range, or two that exclude each other.
    """

    length: int
    batch: int = 1
    lora_rank: int | None = 16
    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    long_lora: bool = False
    quantization: Literal["none", "8bit", "nf4"] = "none"
    optimizer: Literal["adamw", "adamw_8bit", "sgd"] = "adamw"
    checkpointing: bool = True
    loss: Literal["naive", "fused"] = "fused"
    attention: Literal["flash", "sdpa", "eager"] = "flash"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    gpus: int = 1
    context_parallel: int = 1

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(Options).items():
            value, choices = getattr(self, name), get_args(hint)
            optional = value is None and hint == int | None
            if hint in (int, int | None) and not optional and not (isinstance(value, Real) and float(value) > 0):
                raise ValueError(f"{name} must be a number > 0, got {value!r}")
            if choices and isinstance(choices[0], str) and value not in choices:
                known = f"{did_you_mean(str(value), choices)} Known: {', '.join(choices)}"
                raise ValueError(f"unknown {name} {value!r}.{known}")
        if self.gpus % self.context_parallel:
            raise ValueError(f"context_parallel must divide gpus, got {self.context_parallel} and {self.gpus}")
        if self.lora_rank is None and self.quantization != "none":
            raise ValueError(f"quantized weights cannot be trained: {self.quantization} needs LoRA, or choose none")
        if self.lora_rank is None and self.long_lora:
            raise ValueError("long_lora adds embeddings and norms to LoRA; full fine-tuning trains them anyway")
        if not self.target_modules or isinstance(self.target_modules, str):
            raise ValueError(f"target_modules must be a sequence of names, got {self.target_modules!r}")

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
