"""``rope-patch plan``."""

from __future__ import annotations

from dataclasses import asdict

from rope_patch import planning
from rope_patch.options.plan import PlanOptions


def plan(options: PlanOptions) -> None:
    """Run ``rope-patch plan`` with its options."""
    step = asdict(options.step)
    if options.full:
        step["lora_rank"] = None
    planned = planning.plan(options.model, **step)
    if options.as_json:
        print(planned.to_json(options.gpu_memory))
    else:
        print(planned.describe(options.gpu_memory))
