"""The estimate of a dry run: how often and how much is evaluated, and the time on GPUs and on a CPU."""

from __future__ import annotations

import re

import pytest

from rope_patch.planning import shape_of
from rope_patch.training import estimate
from rope_patch.training.estimate import describe, evaluation_flops, evaluations, matmul_speed, tokens_read
from rope_patch.training.reading import read

BASE = {"model": {"name": "llama"}, "data": {"lengths": "512"}, "output": "x", "patch": {"method": "pi:factor=4"}}


def options(*overrides):
    return read(overrides=overrides, base=BASE)


def line(text, start):
    (match,) = [line for line in text.splitlines() if line.startswith(start)]
    return match


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        ([], 2),  # before training and at the end
        (["evaluation.before=false"], 1),
        (["train.steps=10", "evaluation.every=2"], 6),
        (["train.steps=11", "evaluation.every=2"], 6),  # the best of those is saved: the end is not evaluated again
        (["train.steps=10", "evaluation.every=20", "evaluation.before=false"], 1),
    ],
)
def test_evaluations_are_counted(overrides, count):
    assert evaluations(options(*overrides)) == count


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        # 3 windows of 512; 2 haystacks at 256 and 512, read whole once and again from depth .5 on: 2 * 1.5 * 768.
        ([], 3 * 512 + 2304),
        (["evaluation.windows=0"], 2304),
        (["evaluation.mode=multikey"], 3 * 512 + 2 * 768),
        (["evaluation.task=multivalue"], 3 * 512 + 2 * 768),  # one prompt asks for all needles
        (["evaluation.depths=[0.0,0.5,1.0]"], 3 * 512 + round(2 * 2.5 * 768)),
    ],
)
def test_tokens_of_an_evaluation_by_hand(overrides, tokens):
    small = [
        "evaluation.windows=3",
        "evaluation.samples=2",
        "evaluation.depths=[0.5,1.0]",
        "evaluation.lengths=256 512",
    ]
    assert tokens_read(options(*small, *overrides)) == tokens


def test_flops_of_an_evaluation_by_hand():
    """One window of 8 tokens: 2 FLOPs per weight and token, and 4 * q * keys per query of each layer."""
    shape = shape_of("Llama-3.2-1B")
    flops = evaluation_flops(
        options("evaluation.windows=1", "evaluation.lengths=8", "evaluation.samples=1", "evaluation.depths=[1.0]"),
        shape,
    )
    weights = sum(layer.matmul_weights for layer in shape.layers)
    attention = sum(4 * layer.query * (8 * 9 / 2) for layer in shape.layers)
    # The prompt costs as much as the window, but for the head: its logits are those of the answer alone.
    assert flops == pytest.approx(2 * (8 * 2 * weights + attention) + 8 * 2 * shape.head, rel=1e-6)


def test_the_evaluation_is_described_with_its_tokens():
    text = describe(options("train.steps=10", "evaluation.every=5", "evaluation.windows=2"), 80)
    assert line(text, "evaluation: ") == (
        "evaluation: 3 times (before training, every 5 steps), 2 windows of 512 tokens and 20 prompts of 512 tokens, "
        f"about {tokens_read(options('evaluation.windows=2')):,} tokens each time, "
        f"{3 * tokens_read(options('evaluation.windows=2')):,} in all"
    )


def test_the_time_grows_with_steps_and_evaluations():
    units = {"s": 1, "min": 60, "h": 3600}

    def seconds(*overrides):
        text = line(
            describe(options("model.name=Llama-3.1-8B", "data.lengths=128k", *overrides), 80), "time on 1 GPU: "
        )
        times = re.search(r": ([0-9.]+) (\w+) of training and ([0-9.]+) (\w+) of evaluation", text).groups()
        return [float(number) * units[unit] for number, unit in (times[:2], times[2:])]

    few, many = seconds("train.steps=500"), seconds("train.steps=1000")
    assert many[0] == pytest.approx(2 * few[0], rel=0.01) and many[1] == few[1]
    often = seconds("train.steps=500", "evaluation.every=50")
    assert often[0] == few[0] and often[1] == pytest.approx(few[1] * 11 / 2, rel=0.05)


def test_a_cpu_is_given_its_own_time_at_its_own_speed():
    asked = options("train.steps=100")
    assert "CPU" not in describe(asked, 80)
    planned = estimate.training_plan(asked)
    flops = planned.compute.executed_flops * asked.train.accumulate * 100
    text = line(describe(asked, 80, cpu_speed=flops / 60), "time on this CPU: ")
    assert text.startswith("time on this CPU: at least 1.0 min of training and ") and "float32 matrix product" in text


def test_the_speed_of_this_cpu_is_measured():
    assert 1e8 < matmul_speed(64, 0.01) < 1e14


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (["patch.method=null"], "warning: there is no patch.method: unless the checkpoint has a patch of its own"),
        (["train.steps=10"], "warning: train.warmup=20 steps are more than train.steps=10: the learning rate never"),
    ],
)
def test_a_dry_run_warns_of_what_the_run_would_warn_of(overrides, warning):
    assert warning in describe(options(*overrides), 80)
    assert "warning" not in describe(options(), 80)
