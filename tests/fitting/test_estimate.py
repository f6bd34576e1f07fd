"""What a fit says that it will read is what it reads."""

from __future__ import annotations

import math

import pytest
from fits import ALONE, ASKED, fitted
from prompting import TOKENIZER
from tiny import small

from rope_patch.fitting import Objective, Schedule, held_out_spec
from rope_patch.fitting.estimate import cost_of_fit
from rope_patch.modeling.budget import Pace

SCHEDULE = Schedule(ASKED["steps"], ASKED["batch_tokens"], checks=ASKED["checks"])


def spec_of(model):
    return held_out_spec(model, 96, **{name: ASKED[name] for name in ("windows", "samples", "depths")})


@pytest.mark.parametrize("steps", [0, 4])
def test_the_tokens_are_those_that_a_fit_reads(steps):
    read = {}

    def note(stage, tokens):
        read[stage] = read.get(stage, 0) + tokens

    fitted(small(), TOKENIZER, steps=steps, on_progress=note)
    for way in ("halfway", "quarter", "eighth"):  # where the average is no better than the start
        read.pop(f"{way}: evaluation", None)
    model, schedule = small(), Schedule(steps, ASKED["batch_tokens"], checks=ASKED["checks"])
    estimated, seconds = cost_of_fit(Pace(1.0), spec_of(model), ALONE, schedule, trained_length=48, second=False)
    # rows of the steps are of lengths of which 192 tokens need not be a multiple
    assert estimated - 96 * steps <= sum(read.values()) <= estimated
    assert seconds == pytest.approx(estimated + 1.4 * steps * 192)


def test_starts_second_domain_and_checkpointing_cost_more():
    model = small()

    def seconds(schedule=SCHEDULE, **changes):
        return cost_of_fit(Pace(1.0), spec_of(model), ALONE, schedule, **{"trained_length": 48, **changes})[1]

    one = seconds(second=False)
    assert seconds(second=False, starts=3) == 3 * one
    assert seconds() - one == 4 * 2 * 96  # evaluations, windows, tokens of each
    again = Schedule(4, 192, checks=2, checkpointing=True)
    assert seconds(again, second=False) - one == pytest.approx(4 * 192)


def test_attention_costs_what_rows_of_their_lengths_cost():
    spec, schedule = spec_of(small()), Schedule(10, 1000)
    growing = Pace(0.0, 1.0)

    def steps(objective):
        both, alone = (
            cost_of_fit(growing, spec, objective, one, trained_length=48, second=False)[1]
            for one in (schedule, Schedule(0))
        )
        return both - alone * 4

    mean = 0.5 * 96 + 0.5 * 48 / math.log(2)
    assert steps(ALONE) == pytest.approx(2.4 * 10_000 * round(mean))
    assert steps(Objective(positions="pose", mix=0.0)) == pytest.approx(2.4 * 10_000 * 48)
