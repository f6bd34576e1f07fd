"""Plans a training step: the memory it takes, whether it fits, and which options to change if it does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rope_patch.options.plan import ALL_LINEAR, StepOptions
from rope_patch.planning.memory import Part, kv_cache_bytes, prefill_memory, training_memory, weight_bytes
from rope_patch.planning.read_shapes import shape_of
from rope_patch.planning.shapes import Shape
from rope_patch.runtime.text import GIB, parse_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCHEMA = 1
_PARALLEL_SIZES = (2, 4, 8, 16, 32, 64)
_WORTHWHILE_SHARE = 0.98  # advice that saves less than 2 % is left out


_Candidate: TypeAlias = tuple[str, str, dict[str, Any]]
"""An option as it stands on the command line, what it costs, and the changes that it makes."""


@dataclass(frozen=True)
class Step:
    """One option to turn on, in addition to the steps before it, and the peak of the plan with all of them."""

    option: str  # as it stands on the command line
    cost: str
    changes: dict[str, Any]
    total: int  # [bytes per GPU]
    fits: bool


@dataclass(frozen=True)
class Plan:
    """The memory of one training step on each GPU. :func:`plan` makes one."""

    shape: Shape
    options: StepOptions

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The memory by part [bytes per GPU]."""
        return training_memory(self.shape, self.options)

    @property
    def total(self) -> int:
        """Peak memory [bytes per GPU]: the sum of all parts, but of those that take turns only the largest."""
        standing = sum(part.bytes for part in self.parts if not part.turns)
        return standing + max(part.bytes for part in self.parts if part.turns)

    @property
    def inference(self) -> dict[str, int]:
        """The memory of inference on one sequence of this length, without an adapter [bytes]."""
        options = self.options
        parts = {"weights": weight_bytes(self.shape, options), "KV cache": kv_cache_bytes(self.shape, options)}
        return parts | {"prefill in one pass": prefill_memory(self.shape, options)}

    def __getitem__(self, part: str) -> int:
        return {p.name: p.bytes for p in self.parts}[part]

    def fits(self, gpu_memory: float) -> bool:
        """Return whether the peak fits into a GPU of ``gpu_memory`` [GiB]."""
        return self.total <= gpu_memory * GIB

    def but(self, **changes: Any) -> Plan:
        """Return the plan with some options changed."""
        return _checked(self.shape, replace(self.options, **changes))

    def longest(self, gpu_memory: float, *, step: int = 1024) -> int:
        """Return the longest length that fits with these options, a multiple of ``step`` [tokens]; 0 if none fits."""
        # Memory rises with the length: double until it does not fit, then halve the interval. At 2**20 steps it ends.
        low, high = 0, 1
        while high < 2**20 and self.but(length=high * step).fits(gpu_memory):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.but(length=middle * step).fits(gpu_memory) else (low, middle)
        return low * step

    def advice(self, gpu_memory: float) -> list[Step]:
        """Return the options to turn on, in order, until the plan fits [GiB]; an empty list if it fits already.

        Options that change nothing about the result come first, then those that cost precision, then more GPUs. The
        total of a step is that of a plan with this and all earlier steps. A step that saves under 2 % is left out, and
        so is one that later steps made needless. If the last step does not fit, no option makes the plan fit.
        """
        chosen: list[_Candidate] = []
        for candidate in _candidates(self):
            current, with_candidate = self._with(chosen), self._with([*chosen, candidate])
            if current is None or current.fits(gpu_memory):
                break
            if with_candidate is not None and with_candidate.total < _WORTHWHILE_SHARE * current.total:
                chosen.append(candidate)
        # From the last but one back, so that costly steps are dropped before cheap ones; the last made the plan fit.
        for candidate in chosen[-2::-1]:
            fewer = [other for other in chosen if other is not candidate]
            less = self._with(fewer)
            if less is not None and less.fits(gpu_memory):
                chosen = fewer
        plans = [self._with(chosen[: i + 1]) for i in range(len(chosen))]
        return [Step(*c, p.total, p.fits(gpu_memory)) for c, p in zip(chosen, plans, strict=True) if p is not None]

    def _with(self, steps: list[_Candidate]) -> Plan | None:
        """Return the plan after these steps; None if they exclude each other, as NF4 and training every weight do."""
        try:
            return self.but(**{name: value for _, _, changes in steps for name, value in changes.items()})
        except ValueError:
            return None

    def describe(self, gpu_memory: float) -> str:
        """Return the plan as text: the parts, whether they fit [GiB], options to turn on, memory of inference."""
        options, largest = self.options, max(part.bytes for part in self.parts if part.turns)
        lines = [
            f"a training step of {self.shape.name}, {options.batch} x {options.length} tokens, on each GPU of "
            f"{options.gpus} [GiB]:"
        ]
        for part in self.parts:
            idle = "; at another time, not counted" if part.turns and part.bytes < largest else ""
            if part.bytes:
                lines.append(f"  {part.name:12s} {part.bytes / GIB:8.2f}  {part.what}{idle}")
        fits, steps = self.fits(gpu_memory), self.advice(gpu_memory)
        lines.append(
            f"  {'peak':12s} {self.total / GIB:8.2f}  {'fits' if fits else 'does not fit'} into {gpu_memory:g}"
        )
        if steps:
            lines.append("Turn on, in this order:")
        for step in steps:
            lines.append(f"  {step.option}: {step.total / GIB:.1f} GiB{', fits' if step.fits else ''} ({step.cost})")
        if not fits and not (steps and steps[-1].fits):
            lines.append("No other option makes it fit: use a shorter length or a smaller model.")
        longest = self.longest(gpu_memory)
        lines.append(f"longest sequence that fits with these options: {f'{longest} tokens' if longest else 'none'}")
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in self.inference.items())
        lines.append(
            f"inference on one sequence of this length: {sum(self.inference.values()) / GIB:.2f} GiB ({parts})"
        )
        return "\n".join(lines)

    def to_json(self, *, gpu_memory: float | None = None) -> str:
        """Return the plan as JSON [bytes per GPU]; with ``gpu_memory`` [GiB] it also says what fits."""
        data = {
            "schema": SCHEMA,
            "model": self.shape.name,
            "parameters": self.shape.parameters,
            "options": asdict(self.options),
            "total_bytes": self.total,
            "parts": [asdict(part) for part in self.parts],
            "inference_bytes": self.inference,
        }
        if gpu_memory is not None:
            data |= {
                "gpu_memory_gib": gpu_memory,
                "fits": self.fits(gpu_memory),
                "longest_length": self.longest(gpu_memory),
                "advice": [asdict(step) for step in self.advice(gpu_memory)],
            }
        return json.dumps(data, indent=2, allow_nan=False)


def plan(model: str | Path | PreTrainedModel | Shape, *, length: int | str, **options: Any) -> Plan:
    """Plan the memory of a fine-tuning step from a config alone.

    Args:
        model: the name of a shipped config, a checkpoint folder, a hub id, a GGUF file, a model, or a shape that was
            read earlier.
        length: the length of a sequence [tokens]; ``"128k"`` is 131072.
        **options: the other fields of :class:`~rope_patch.options.plan.StepOptions`.

    Raises:
        ValueError: the model is unknown or an option is wrong; the message says what to do.
        TypeError: there is no option of that name.
        OSError: there is nothing that can be loaded, or no such repository.
    """
    tokens = parse_length(length) if isinstance(length, str) else length
    return _checked(shape_of(model), StepOptions(length=tokens, **options))


def _checked(shape: Shape, options: StepOptions) -> Plan:
    """Return a plan, or raise if the model cannot be trained with these options."""
    known = {x.name.rpartition(".")[2]: None for layer in shape.kinds for x in layer.linears}
    for name in options.target_modules:
        if name not in (ALL_LINEAR, "attention", *known):
            raise ValueError(
                f"target_modules name {name!r} matches no projection of {shape.name}. "
                f"Known: {ALL_LINEAR}, attention, {', '.join(known)}"
            )
    if options.attention == "sdpa" and not shape.sdpa:
        raise ValueError(f"{shape.name} has no sdpa attention in transformers: take flash")
    return Plan(shape, options)


def _candidates(planned: Plan) -> Iterator[_Candidate]:
    options = planned.options
    # Devices that share a row attend to all of it, so a model with sliding windows would be trained wrongly.
    groups = () if any(layer.window is not None for layer in planned.shape.kinds) else _PARALLEL_SIZES
    shared = "the same gradients, each sequence divided among them"
    if options.dtype == "float32" and options.lora_rank is not None:
        yield "--dtype bfloat16", "frozen weights and activations in 16 bits", {"dtype": "bfloat16"}
    yield "--attention flash", "the same attention; needs the kernel", {"attention": "flash"}
    yield "--checkpointing", "the same gradients, up to a third more time", {"checkpointing": True}
    yield "--batch 1", "accumulate gradients to keep the batch", {"batch": 1}
    for n in groups:
        if options.context_parallel < n and options.gpus % n == 0:
            yield f"--context-parallel {n}", shared, {"context_parallel": n}
    yield "--optimizer adamw_8bit", "states rounded to 8 bits", {"optimizer": "adamw_8bit"}
    if options.lora_rank is None:
        yield "no --full", "adapters of rank 16 in place of full fine-tuning", {"lora_rank": 16}
    yield "--quantization nf4", "frozen weights rounded to 4 bits; slower", {"quantization": "nf4"}
    for n in _PARALLEL_SIZES:
        if n > options.gpus:
            yield f"--gpus {n}", "weights and states divided among them (FSDP)", {"gpus": n}
            if n in groups:
                yield f"--gpus {n} --context-parallel {n}", shared, {"gpus": n, "context_parallel": n}
