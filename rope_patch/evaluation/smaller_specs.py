"""Counts the tokens that an :class:`EvalSpec` reads, and finds smaller specs of the same measurement.

Every spec here states a number of windows: that of its suite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace

from rope_patch.evaluation.tasks import TASKS
from rope_patch.options.evaluation import EvalSpec

SMALLEST_WINDOWS = 4
"""Fewest windows of text that a smaller spec keeps: an interval over two or three windows is too wide to be useful."""

SCALABLE = ("windows", "samples")
"""Fields that a smaller spec may lower: they decide how precise a result is. The other fields decide what is
measured."""


def check_tasks(spec: EvalSpec) -> EvalSpec:
    """Return the spec if all its tasks are known.

    Raises:
        ValueError: a task is unknown; the message names the known ones.
    """
    for task in spec.tasks:
        TASKS.find(task)
    return spec


def tokens_to_read(spec: EvalSpec) -> int:
    """Return how many tokens one run reads; the progress bar counts to this number."""
    # A joined task asks for all its needles in one prompt; any other task has a prompt for each depth.
    prompts = sum(1 if TASKS.find(task).joined else len(spec.depths) for task in spec.tasks)
    return (spec.windows or 0) * spec.longest + prompts * spec.samples * sum(spec.lengths)


def tokens_computed(spec: EvalSpec) -> float:
    """Return how many tokens the model computes in one run: fewer than :func:`tokens_to_read` counts.

    Prompts of one haystack share the text before the needle, and the model computes that part once.
    """
    # The prompt with the deepest needle is computed whole. A prompt with its needle at depth d shares its first d with
    # that one, so only the remaining 1 - d of it is computed.
    whole = len(spec.depths) - math.fsum(spec.depths[:-1])  # prompts, counted in lengths
    prompts = spec.samples * math.fsum(1 if TASKS.find(task).joined else whole for task in spec.tasks)
    return (spec.windows or 0) * spec.longest + prompts * sum(spec.lengths)


def spec_within(
    spec: EvalSpec,
    most: float,
    scalable: Collection[str] = SCALABLE,
    cost: Callable[[EvalSpec], float] = tokens_to_read,
) -> EvalSpec:
    """Return a spec whose cost is within a limit: the same measurement with fewer windows and samples.

    If four windows and one sample still cost too much, the longest lengths are left out, as many as needed.

    Args:
        spec: the spec that would be measured without a limit.
        most: largest cost allowed, in the unit of ``cost``, which is tokens by default.
        scalable: the fields that may be lowered, out of ``windows`` and ``samples``.
        cost: a function that returns the cost of a spec, such as the seconds that it takes; by default the tokens that
            it reads.

    Raises:
        ValueError: even the smallest spec costs more than the limit.
    """
    # A length that is left out is not measured at all, so it goes only after precision has been given up at every
    # length.
    for count in range(len(spec.lengths), 0, -1):
        for candidate in smaller_specs(with_shortest_lengths(spec, count), scalable):
            if cost(candidate) <= most:
                return candidate
    least = smallest_spec(with_shortest_lengths(spec, 1), scalable)
    raise ValueError(
        f"at least {tokens_to_read(least)} tokens would be read under each method or format, at {least.longest} "
        f"tokens alone, and that is {cost(least) / max(most, 1e-9):.1f} times what fits into the time: give more "
        "time, shorter lengths, or fewer methods or formats"
    )


def with_shortest_lengths(spec: EvalSpec, count: int) -> EvalSpec:
    """Return a spec of only the ``count`` shortest lengths; its position buckets are as wide as before."""
    if count == len(spec.lengths):
        return spec
    # The default width is a sixteenth of the longest length, so it would shrink with it: it is stated instead.
    return replace(spec, lengths=spec.lengths[:count], bucket=spec.bucket_width)


def smallest_spec(spec: EvalSpec, scalable: Collection[str] = SCALABLE) -> EvalSpec:
    """Return the smallest spec of the same lengths: four windows and one sample."""
    return smaller_specs(spec, scalable)[-1]


def smaller_specs(spec: EvalSpec, scalable: Collection[str]) -> list[EvalSpec]:
    """Return this spec and smaller ones of the same lengths, the largest first.

    Windows and samples are lowered together, and when one sample is left the windows are lowered alone.

    Args:
        spec: the spec that would be measured without a limit.
        scalable: the fields that may be lowered, as for :func:`spec_within`.
    """
    windows = spec.windows or 0
    least = min(SMALLEST_WINDOWS, windows) if "windows" in scalable else windows
    specs = [spec]
    if spec.tasks and "samples" in scalable:
        for samples in range(spec.samples - 1, 0, -1):
            # In proportion, so that perplexity and retrieval lose about as much precision.
            count = max(least, round(windows * samples / spec.samples))
            specs.append(replace(spec, samples=samples, windows=count))
    last = specs[-1].windows or 0
    return specs + [replace(specs[-1], windows=count) for count in range(last - 1, least - 1, -1)]


def what_is_lost(spec: EvalSpec, less: EvalSpec) -> str:
    """Return a sentence that says what a smaller spec loses; "" if it is the same spec."""
    parts = []
    if less.samples < spec.samples:
        parts.append(f"{less.samples} instead of {spec.samples} samples at each length and depth")
    if less.windows != spec.windows:
        parts.append(f"{less.windows} instead of {spec.windows} windows")
    left_out = [str(length) for length in spec.lengths if length not in less.lengths]
    if left_out:
        parts.append(f"nothing is measured at {' and '.join(left_out)} tokens")
    return ", ".join(parts)
