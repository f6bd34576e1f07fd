"""What a fit says that it will read is what it reads."""

from __future__ import annotations

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
