"""Plans a training step: the memory it takes, whether it fits, and which options to change if it does not."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_patch.options.plan import ALL_LINEAR, StepOptions
from rope_patch.planning.memory import reading_memory, training_memory
from rope_patch.planning.shapes import Shape, shape_of
from rope_patch.runtime.text import GIB, parse_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCHEMA = 3
_PARALLEL_SIZES = (2, 4, 8, 16, 32, 64)
_WORTHWHILE_SHARE = 0.98  # advice that saves less than 2 % is left out


@dataclass(frozen=True)
class Step:
    """One option to turn on, in addition to the steps before it, and the peak of the plan with all of them."""

    option: str  # as it stands on the command line
    cost: str
    total: int  # [bytes per GPU]
    fits: bool


@dataclass(frozen=True)
class Plan:
    """The memory of one training step on each GPU. :func:`plan` makes one."""

    shape: Shape
    options: StepOptions

    def __post_init__(self) -> None:
        """Check that the model can be trained with these options."""
        known = [ALL_LINEAR, "attention", *dict.fromkeys(x.name for layer in self.shape.kinds for x in layer.linears)]
        unknown = set(self.options.target_modules).difference(known)
        if unknown:
            raise ValueError(
                f"target_modules: {', '.join(unknown)} matches no projection of {self.shape.name}. "
                f"Known: {', '.join(known)}"
            )
        if self.options.attention == "sdpa" and not self.shape.sdpa:
            raise ValueError(f"{self.shape.name} has no sdpa attention in transformers: take flash")

    @property
    def parts(self) -> dict[str, int]:
        """The memory by part [bytes per GPU]."""
        return training_memory(self.shape, self.options)

    @property
    def total(self) -> int:
        """Peak memory [bytes per GPU]; a layer's backward pass and the loss are never live together."""
        return sum(self.parts.values()) - min(self.parts["layer"], self.parts["loss"])

    @property
    def reading(self) -> dict[str, int]:
        """Weights and cache of one sequence of this length, and the peaks of perplexity and retrieval on it [bytes]."""
        return reading_memory(self.shape, self.options)

    def fits(self, gpu_memory: float) -> bool:
        """Return whether the peak fits into a GPU of ``gpu_memory`` [GiB]."""
        return self.total <= gpu_memory * GIB

    def but(self, **changes: Any) -> Plan:
        """Return the plan with some options changed."""
        return Plan(self.shape, replace(self.options, **changes))

    def longest(self, gpu_memory: float) -> int:
        """Return the longest length that fits with these options, a multiple of 1024 [tokens]; 0 if none fits."""
        lengths = range(1024, 2**30, 1024)
        return 1024 * bisect_right(lengths, gpu_memory * GIB, key=lambda length: self.but(length=length).total)

    def advice(self, gpu_memory: float) -> list[Step]:
        """Return the options to turn on, in order, until the plan fits [GiB]; an empty list if it fits already.

        Options that keep the result come first, each that saves 2 %. If they do not suffice, the first option follows
        that makes the plan fit: the GPUs share a sequence, numbers are rounded, or there are more GPUs. If the last
        step does not fit, no option makes the plan fit. The total of a step is that of a plan with all earlier steps,
        too.
        """
        steps = []
        current = self
        for option, cost, must_fit, changes in _candidates(self):
            changed = current.but(**changes)
            fits = changed.fits(gpu_memory)
            saves = changed.total < _WORTHWHILE_SHARE * current.total
            if not current.fits(gpu_memory) and (fits or (saves and not must_fit)):
                steps.append(Step(option, cost, changed.total, fits))
                current = changed
        return steps

    def describe(self, gpu_memory: float) -> str:
        """Return the plan as text: the parts, whether they fit [GiB], options to turn on, memory of reading."""
        options = self.options
        fits = "fits" if self.fits(gpu_memory) else "does not fit"
        sizes = [f"{name} {size / GIB:.2f}" for name, size in self.reading.items()]
        lines = [
            f"a training step of {self.shape.name} ({self.shape.parameters / 1e9:.2f} B parameters), {options.batch} x "
            f"{options.length} tokens, on each GPU of {options.gpus} [GiB]; of layer and loss the larger counts:",
            *(f"  {name:12s} {size / GIB:8.2f}" for name, size in self.parts.items() if size),
            f"  {'peak':12s} {self.total / GIB:8.2f}  {fits} into {gpu_memory:g}",
        ]
        steps = self.advice(gpu_memory)
        if steps:
            lines.append("Turn on, in this order:")
        lines += [f"  {step.option}: {step.total / GIB:.1f} GiB ({step.cost})" for step in steps]
        if not self.fits(gpu_memory) and not any(step.fits for step in steps):
            lines.append("No option makes it fit: use a shorter length or a smaller model.")
        lines.append(f"longest sequence that fits with these options: {self.longest(gpu_memory)} tokens")
        lines.append(
            f"reading one sequence of this length, with the peaks of perplexity and retrieval [GiB]: {', '.join(sizes)}"
        )
        return "\n".join(lines)

    def to_json(self, gpu_memory: float) -> str:
        """Return the plan as JSON [bytes per GPU], with what fits into a GPU of ``gpu_memory`` [GiB]."""
        data = {
            "schema": SCHEMA,
            "model": self.shape.name,
            "parameters": self.shape.parameters,
            "options": asdict(self.options),
            "total_bytes": self.total,
            "parts_bytes": self.parts,
            "reading_bytes": self.reading,
            "fits": self.fits(gpu_memory),
            "longest_length": self.longest(gpu_memory),
            "advice": [asdict(step) for step in self.advice(gpu_memory)],
        }
        return json.dumps(data, indent=2, allow_nan=False)


def plan(model: str | Path | PreTrainedModel, *, length: int | str, **options: Any) -> Plan:
    """Plan the memory of a fine-tuning step from a config alone.

    Args:
        model: the name of a shipped config, a checkpoint folder, a hub id, a GGUF file, or a model.
        length: the length of a sequence [tokens]; ``"128k"`` is 131072.
        **options: the other fields of :class:`~rope_patch.options.plan.StepOptions`.

    Raises:
        ValueError: the model is unknown or an option is wrong; the message says what to do.
        TypeError: there is no option of that name.
        OSError: there is nothing that can be loaded, or no such repository.
    """
    if isinstance(length, str):
        length = parse_length(length)
    return Plan(shape_of(model), StepOptions(length=length, **options))


def _candidates(planned: Plan) -> Iterator[tuple[str, str, bool, dict[str, Any]]]:
    """Yield each option as it stands on the command line, its cost, whether it must make the plan fit, its changes."""
    options = planned.options
    # Devices that share a row attend to all of it, so a model with sliding windows would be trained wrongly.
    groups = () if any(layer.window for layer in planned.shape.kinds) else _PARALLEL_SIZES
    shared = "the same gradients, each sequence divided among them"
    lora = {"lora_rank": options.lora_rank or 16}
    yield "--dtype bfloat16", "activations and frozen weights in 16 bits", False, {"dtype": "bfloat16"}
    yield "--attention flash", "the same attention; needs the kernel", False, {"attention": "flash"}
    yield "--checkpointing", "the same gradients, up to a third more time", False, {"checkpointing": True}
    yield "--batch 1", "accumulate gradients to keep the batch", False, {"batch": 1}
    for n in groups:
        if options.gpus % n == 0:
            yield f"--context-parallel {n}", shared, True, {"context_parallel": n}
    yield "--optimizer adamw_8bit", "states rounded to 8 bits", True, {"optimizer": "adamw_8bit"}
    yield "no --full", "adapters of rank 16 in place of full fine-tuning", True, lora
    yield "--quantization nf4", "adapters on weights rounded to 4 bits; slower", True, lora | {"quantization": "nf4"}
    for more in _PARALLEL_SIZES:
        n = more * options.gpus
        yield f"--gpus {n}", "weights and states divided among them (FSDP)", True, {"gpus": n}
        if groups:
            yield f"--gpus {n} --context-parallel {n}", shared, True, {"gpus": n, "context_parallel": n}
