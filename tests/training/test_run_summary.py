"""The estimate of a dry run: what is evaluated, and the memory."""

from __future__ import annotations

import pytest
from support.recipe_runs import recipe

from rope_patch.planning import plan
from rope_patch.training.run_summary import describe

BASE = ("model.name=Llama-3.1-8B", "data.length=32k", "output=x", "patch.method=pi:factor=4")


def options(*overrides):
    return recipe(*BASE, *overrides)


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        ([], 2),  # with and without the adapter
        (["evaluation.before=false"], 1),
        (["lora.rank=0", "model.dtype=float32"], 1),
        (["train.steps=11", "evaluation.every=2"], 7),
    ],
)
def test_evaluations_are_counted(overrides, count):
    assert f"evaluations: {count}, " in describe(options(*overrides), 80)


def test_a_dry_run_says_steps_memory_and_evaluations():
    text = describe(options("train.steps=100", "evaluation.lengths=8k 32k", "evaluation.windows=2"), 80)
    assert "100 steps of 262144 tokens" in text
    assert plan("Llama-3.1-8B", length=32768, attention="sdpa").describe(80) in text
    assert "evaluations: 2, each of 2 windows of 32768 tokens and 40 prompts of 8192 and 32768 tokens" in text
