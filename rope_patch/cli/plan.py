"""``rope-patch plan``; neither torch nor transformers is imported for a model whose shape ships with the package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rope_patch.cli.parsing import parse
from rope_patch.cli.printing import new_table, show
from rope_patch.options.plan import PlanOptions


def plan(words: Sequence[str]) -> None:
    """Run ``rope-patch plan`` with the words behind it."""
    options = parse(PlanOptions, words)
    from rope_patch import planning

    step = asdict(options.step) | ({"lora_rank": None} if options.full else {})
    planned = planning.plan(options.model, **step)
    if options.as_json:
        print(planned.to_json(gpu_memory=options.gpu_memory))
    else:
        _print_plan(planned, options.gpu_memory)


def _print_plan(planned: Any, gpu_memory: float) -> None:
    """Print a plan for people: the parts, whether they fit, and what to turn on."""
    o, gib = planned.options, 2.0**30
    title = f"{planned.shape.name}, {o.batch} x {o.length} tokens, {o.gpus} GPU{'s' * (o.gpus > 1)}"
    table = new_table("part", "GiB per GPU", "what", title=title, right=["GiB per GPU"])
    largest = max(part.bytes for part in planned.parts if part.turns)
    for part in planned.parts:
        idle = part.turns and part.bytes < largest
        what = f"{part.what}; at another time, not counted" if idle else part.what
        if part.bytes:
            table.add_row(part.name, f"{part.bytes / gib:.2f}", what, style="dim" if idle else None)
    table.add_section()
    table.add_row("peak", f"{planned.total / gib:.2f}", f"of {gpu_memory:g}", style="bold")
    show(table)
    steps = planned.advice(gpu_memory)
    print("fits" if planned.fits(gpu_memory) else "does not fit" + (". Turn on, in this order:" if steps else ""))
    for step in steps:
        print(f"  {step.option}: {step.total / gib:.1f} GiB{', fits' * step.fits} ({step.cost})")
    if not planned.fits(gpu_memory) and not (steps and steps[-1].fits):
        print("  no other option makes it fit: use a shorter length or a smaller model")
    longest = planned.longest(gpu_memory)
    print(f"longest sequence that fits with these options: {f'{longest} tokens' if longest else 'none'}")
    print(
        f"evaluation at this length: {planned.kv_cache / gib:.2f} GiB of keys and values per sequence, beside weights"
    )
