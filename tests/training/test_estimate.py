"""The estimate of a dry run: what is evaluated, the memory, and what to change where it does not fit."""

from __future__ import annotations

import pytest
from support.recipe_runs import recipe

from rope_patch.planning import plan
from rope_patch.training.estimate import describe, evaluations, memory_advice, training_plan

BASE = ("model.name=Llama-3.1-8B", "data.lengths=32k", "output=x", "patch.method=pi:factor=4")
GIB = 2**30


def options(*overrides):
    return recipe(*BASE, *overrides)


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        ([], 2),  # before training and at the end
        (["evaluation.before=false"], 1),
        (["train.steps=11", "evaluation.every=2"], 6),  # the best of those is saved: the end is not evaluated again
        (["train.steps=10", "evaluation.every=20", "evaluation.before=false"], 1),
    ],
)
def test_evaluations_are_counted(overrides, count):
    assert evaluations(options(*overrides)) == count


def test_a_dry_run_says_steps_memory_and_evaluations():
    text = describe(options("train.steps=100", "evaluation.lengths=8k 32k", "evaluation.windows=2"), 80)
    assert "100 steps of 262144 tokens" in text
    assert f"{plan('Llama-3.1-8B', length=32768, attention='sdpa').total / GIB:.1f} GiB, fits into 80" in text
    assert "evaluations: 2, each of 2 windows of 32768 tokens and 40 prompts of 8192 and 32768 tokens" in text


@pytest.mark.parametrize("overrides", [["patch.method=null"], ["train.steps=10"]])
def test_a_dry_run_warns_of_what_the_run_would_warn_of(overrides):
    assert "warning: " in describe(options(*overrides), 80)
    assert "warning" not in describe(options(), 80)


def test_advice_is_that_of_the_plan_in_the_options_of_the_recipe():
    asked = options("data.lengths=128k", "train.checkpointing=false", "train.batch=2")
    lines = memory_advice(asked, 80).splitlines()
    changes = [line for line in lines if line.startswith("- ")]
    assert changes[0].startswith("- train.checkpointing=true: ")
    planned = training_plan(asked)
    for step, line in zip(planned.advice(80), changes, strict=True):
        assert f": {step.total / GIB:.1f} GiB (" in line
        for part in line[2:].partition(":")[0].split(", "):
            if "=" in part and " " not in part:
                options(part)  # the recipe knows it


def test_frozen_weights_in_float32_are_the_first_thing_to_change():
    asked = options("model.dtype=float32")
    assert "- model.dtype=bfloat16: " in memory_advice(asked, 50)


def test_a_model_without_a_plan_gets_general_advice(tmp_path):
    assert "No plan covers this model" in memory_advice(options(f"model.name={tmp_path}"), 80)
