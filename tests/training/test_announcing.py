"""A run says how many tokens it reads, and how long its steps take once they are measured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rope_patch.training.announcing import Announcement
from rope_patch.training.reading import read


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr("time.perf_counter", lambda: now.seconds)
    return now


def options(**evaluation):
    return read(
        base={
            "model": {"name": "llama"},
            "data": {"lengths": "512"},
            "train": {"steps": 100, "batch": 1, "accumulate": 4},
            "evaluation": {"lengths": "512", "windows": 2, "samples": 1, "depths": [0.5], **evaluation},
            "output": "out",
        }
    )


def state(step, first=True):
    return SimpleNamespace(global_step=step, max_steps=100, is_world_process_zero=first)


def test_tokens_come_first_and_the_time_after_the_first_steps(clock, capsys):
    said = Announcement(options(every=50, before=True), 1)
    said.on_train_begin(None, state(0), None)
    # 100 steps of 4 rows of 512 tokens; 3 evaluations of 2 windows and a prompt
    begin = capsys.readouterr().err
    assert "trains on 204,800 tokens in 100 steps, and evaluates the model" in begin
    assert "3 times on about 1,536 tokens" in begin
    clock.seconds += 30
    said.on_evaluate(None, state(0), None)
    for step, seconds in enumerate([20, 2, 2, 2], start=1):  # the first step compiles
        clock.seconds += seconds
        assert not capsys.readouterr().err
        said.on_step_end(None, state(step), None)
    line = capsys.readouterr().err
    assert line == "the 96 steps that are left take about 3 min, and 2 evaluations 60 s\n"
    clock.seconds += 100
    said.on_step_end(None, state(5), None)
    assert not capsys.readouterr().err, "once is enough"


def test_an_evaluation_between_two_steps_is_no_part_of_them(clock, capsys):
    said = Announcement(options(every=2), 1)
    said.on_train_begin(None, state(0), None)
    capsys.readouterr()
    for step in (1, 2, 3, 4):
        clock.seconds += 2
        said.on_step_end(None, state(step), None)
        if step == 2:
            clock.seconds += 1000
            said.on_evaluate(None, state(step), None)
    assert capsys.readouterr().err == "the 96 steps that are left take about 3 min, and 48 evaluations 13.3 h\n"


def test_a_resumed_run_speaks_of_what_is_left_and_only_the_first_process_speaks(clock, capsys):
    said = Announcement(options(), 2)
    said.on_train_begin(None, state(75, first=False), None)
    assert not capsys.readouterr().err
    said.on_train_begin(None, state(75), None)
    assert "trains on 102,400 tokens in 25 steps" in capsys.readouterr().err
