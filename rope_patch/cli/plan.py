"""``rope-patch plan``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rope_patch.cli.parsing import parse_words
from rope_patch.options.plan import PlanOptions


def plan(words: Sequence[str]) -> None:
    """Run ``rope-patch plan`` with the words that follow it."""
    options = parse_words(PlanOptions, words)
    from rope_patch import planning

    step = asdict(options.step)
    if options.full:
        step["lora_rank"] = None
    planned = planning.plan(options.model, **step)
    if options.as_json:
        print(planned.to_json(options.gpu_memory))
    else:
        print(planned.describe(options.gpu_memory))
