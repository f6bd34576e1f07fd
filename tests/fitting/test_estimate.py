"""What a fit says that it will read is what it reads."""

from __future__ import annotations

import dataclasses
import math

import pytest
from fits import ALONE, ASKED, TEXT, fitted
from prompting import TOKENIZER
from tiny import small

from rope_patch.fitting import Objective, Schedule, held_out_spec
from rope_patch.fitting.estimate import FitCost
from rope_patch.modeling.budget import Pace

WAYS = ("halfway", "quarter", "eighth")  # tried where the average is no better than the start


def cost_of(schedule=None, objective=ALONE, **changes):
    spec = held_out_spec(small(), 96, **{name: ASKED[name] for name in ("windows", "samples", "depths")})
    schedule = schedule or Schedule(4, 192, checks=2)
    return FitCost(spec, objective, schedule, 48, **{"second": 0, **changes})


@pytest.mark.parametrize(
    "changes", [{"steps": steps} for steps in range(5)] + [{"second": TEXT, "init": ["yarn", "pi"]}]
)
def test_the_tokens_are_those_that_a_fit_reads(changes):
    read, said = {}, []

    def note(stage, tokens):
        read[stage] = read.get(stage, 0) + tokens

    fitted(small(), TOKENIZER, on_start=said.append, on_progress=note, **changes)
    (cost,) = said
    more = sum(read.pop(f"{stage}: evaluation", 0) for stage in (*WAYS, "unpatched"))
    # a row of 96 tokens fits twice into the 192 of a step, other lengths leave some of them unused
    assert cost.tokens - 96 * cost.schedule.steps * cost.starts <= sum(read.values()) <= cost.tokens
    assert cost.unpatched == 2 * 64 <= more <= cost.more, "no table answers, so the unpatched model is asked too"


def test_nothing_is_announced_before_everything_is_checked():
    said = []
    with pytest.raises(ValueError, match="batch_tokens must be >= 192"):
        fitted(small(), TOKENIZER, batch_tokens=100, on_start=said.append)
    assert not said


def test_starts_second_domain_and_checkpointing_take_longer():
    one = cost_of().seconds(Pace(1.0))
    assert cost_of(starts=3).seconds(Pace(1.0)) == 3 * one
    assert cost_of(second=None).seconds(Pace(1.0)) - one == 4 * 2 * 96  # evaluations, windows, tokens of each
    again = cost_of(Schedule(4, 192, checks=2, checkpointing=True)).seconds(Pace(1.0))
    assert again - one == pytest.approx(4 * 192)


def test_attention_takes_what_rows_of_their_lengths_take():
    def steps(objective):
        schedules = Schedule(10, 1000), Schedule(0)
        both, alone = (cost_of(one, objective).seconds(Pace(0.0, 1.0)) for one in schedules)
        return both - alone * 4

    mean = 0.5 * 96 + 0.5 * 48 / math.log(2)
    assert steps(ALONE) == pytest.approx(2.4 * 10_000 * round(mean))
    assert steps(Objective(positions="pose", mix=0.0)) == pytest.approx(2.4 * 10_000 * 48)


def test_a_fit_within_a_time_has_fewer_windows_and_samples_and_then_fewer_steps():
    whole = cost_of(Schedule(40, 192), windows=None, second=None)
    spec = dataclasses.replace(whole.spec, windows=8, samples=4)
    whole = dataclasses.replace(whole, spec=spec)
    scalable, price = ["windows", "samples", "steps"], lambda fit: fit.seconds(Pace(1.0))
    assert whole.within(price(whole), scalable, price) == whole
    assert whole.loss_of(whole) == ""
    some = whole.within(0.9 * price(whole), scalable, price)
    assert price(some) <= 0.9 * price(whole) and some.schedule.steps == 40
    assert some.spec.samples < 4 and some.spec.lengths == spec.lengths
    # 40 steps cost 40 * 192 * 2.4 = 18432, and evaluations at least 4 * 8 * 96 = 3072 for 4 windows of both texts
    least = whole.within(16000, scalable, price)
    assert least.spec.windows == 4 and least.schedule.steps == 20 and price(least) <= 16000
    assert "instead of 40 steps" in whole.loss_of(least) and "4 instead of 8 windows" in whole.loss_of(least)
    assert whole.within(1e9, [], price) == whole
    with pytest.raises(ValueError, match=r"times what fits into the time: .* or --positions pose"):
        whole.within(3000, scalable, price)
    with pytest.raises(ValueError, match="smallest fit to 96 tokens"):
        whole.within(0.9 * price(whole), ["steps"], lambda fit: price(fit) * 10)
