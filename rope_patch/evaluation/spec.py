"""What an evaluation of an :class:`EvalSpec` reads, and smaller ones of the same kind that read less."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace

from rope_patch.evaluation.tasks import TASKS
from rope_patch.options.evaluation import EvalSpec

SMALLEST_WINDOWS = 4
"""Windows that a smaller spec keeps: the interval of two or three is useless."""

SCALABLE = ("windows", "samples")
"""Fields that a smaller spec may lower: the others say what is measured, not how precisely."""

DEFAULT_WINDOWS = 16
"""Windows of text by default, where the text has room for so many."""


def check_tasks(spec: EvalSpec) -> EvalSpec:
    """Return a spec whose tasks are known.

    Raises:
        ValueError: an unknown task; the known ones are named.
    """
    for task in spec.tasks:
        TASKS.find(task)
    return spec


def tokens_to_read(spec: EvalSpec, windows: int | None = None) -> int:
    """Return the tokens that one run reads, for a progress bar.

    Args:
        spec: what is measured.
        windows: of text that there are; by default those asked for.
    """
    asked = DEFAULT_WINDOWS if spec.windows is None else spec.windows
    prompts = sum(1 if TASKS.find(task).joined else len(spec.depths) for task in spec.tasks)
    return (asked if windows is None else windows) * spec.longest + prompts * spec.samples * sum(spec.lengths)


def tokens_computed(spec: EvalSpec) -> float:
    """Return the tokens that the model computes in one run: fewer than :func:`tokens_to_read`.

    What the prompts of a haystack share is computed once: all that stands before the needle.
    """
    asked = DEFAULT_WINDOWS if spec.windows is None else spec.windows
    whole = len(spec.depths) - math.fsum(spec.depths[:-1])  # of the deepest prompt the others are read in part
    prompts = spec.samples * math.fsum(1 if TASKS.find(task).joined else whole for task in spec.tasks)
    return asked * spec.longest + prompts * sum(spec.lengths)


def within(
    spec: EvalSpec,
    most: float,
    scalable: Collection[str] = SCALABLE,
    cost: Callable[[EvalSpec], float] = tokens_to_read,
) -> EvalSpec:
    """Return a spec that costs at most so much: the same task with fewer windows and samples.

    Where four windows and one sample cost too much, the longest lengths are left out, as many as needed.

    Args:
        spec: what is measured with time enough.
        most: at most, in the unit of the cost; tokens by default.
        scalable: of ``windows`` and ``samples``, those that may be lowered.
        cost: of a spec, such as the time it takes; by default the tokens that it reads.

    Raises:
        ValueError: the least that can be read costs more.
    """
    for count in range(len(spec.lengths), 0, -1):
        for candidate in smaller(shortened(spec, count), scalable):
            if cost(candidate) <= most:
                return candidate
    least = smallest(shortened(spec, 1), scalable)
    raise ValueError(
        f"at least {tokens_to_read(least)} tokens would be read under each method or scheme, at {least.longest} "
        f"tokens alone, and that is {cost(least) / max(most, 1e-9):.1f} times what fits into the time: give more "
        "time, shorter lengths, or fewer methods or schemes"
    )


def shortened(spec: EvalSpec, count: int) -> EvalSpec:
    """Return the spec of the shortest lengths, as many as given; buckets stay as wide as they are."""
    if count == len(spec.lengths):
        return spec
    return replace(spec, lengths=spec.lengths[:count], bucket=spec.bucket_width)


def smallest(spec: EvalSpec, scalable: Collection[str] = SCALABLE) -> EvalSpec:
    """Return the spec of this kind that reads least: four windows and one sample."""
    return smaller(spec, scalable)[-1]


def smaller(spec: EvalSpec, scalable: Collection[str]) -> list[EvalSpec]:
    """Return this spec and smaller ones of the same lengths, by falling number of tokens.

    Windows become fewer together with the samples, then alone.

    Args:
        spec: what is measured with time enough.
        scalable: as for :func:`within`.
    """
    windows = DEFAULT_WINDOWS if spec.windows is None else spec.windows
    least = min(SMALLEST_WINDOWS, windows) if "windows" in scalable else windows
    specs = [spec]
    if "samples" in scalable:
        for samples in range(spec.samples - 1, 0, -1):
            count = max(least, round(windows * samples / spec.samples))
            specs.append(replace(spec, samples=samples, windows=count))
    last = windows if specs[-1].windows is None else specs[-1].windows
    return specs + [replace(specs[-1], windows=count) for count in range(last - 1, least - 1, -1)]


def cost_of(spec: EvalSpec, less: EvalSpec) -> str:
    """Return what is lost with a spec of :func:`within`, as a sentence; "" where nothing is."""
    if less == spec:
        return ""
    from rope_patch.evaluation.intervals import widening

    before, after = (DEFAULT_WINDOWS if one.windows is None else one.windows for one in (spec, less))
    parts, wider = [], math.sqrt(spec.samples / less.samples)
    if less.samples < spec.samples:
        parts.append(f"{less.samples} instead of {spec.samples} samples at each length and depth")
    if 1 < after < before:
        parts.append(f"{after} instead of {before} windows")
        wider = max(wider, widening(before, after))
    sentence = f"{', '.join(parts)}: intervals are up to {wider:.1f} times as wide" if parts else ""
    left_out = [str(length) for length in spec.lengths if length not in less.lengths]
    if not left_out:
        return sentence
    missing = f"nothing is measured at {' and '.join(left_out)} tokens"
    return f"{sentence}; {missing}" if sentence else missing
