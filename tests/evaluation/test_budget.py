"""How much is read in a time, and by default: fewer tokens the larger a model is."""

from __future__ import annotations

import pytest
from tiny import tiny_model

from rope_patch.evaluation import budget
from rope_patch.evaluation.budget import MEASURING, SAFETY, default_tokens, tokens_per_second, tokens_within
from rope_patch.evaluation.spec import EvalSpec


def test_twice_the_parameters_read_half_as_much():
    small, large = tiny_model(vocab_size=64), tiny_model(vocab_size=4096)
    ratio = sum(p.numel() for p in large.parameters()) / sum(p.numel() for p in small.parameters())
    assert ratio > 1.5
    assert default_tokens(small) / default_tokens(large) == pytest.approx(ratio, rel=1e-3)


def test_the_speed_of_a_model_is_measured_and_its_mode_is_kept():
    model = tiny_model().train()
    assert tokens_per_second(model, 64, rows=4) > 0 and model.training


class Clock:
    """A time that passes only while rows are read."""

    def __init__(self, monkeypatch, cost):
        self.now, self.cost, self.shapes = 0.0, cost, []
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def speed(self, length, **options):
        return tokens_per_second(tiny_model(), length, read=self.read, **options)

    def read(self, ids):
        self.shapes.append(tuple(ids.shape))
        self.now += self.cost(*ids.shape)


def test_what_is_too_long_to_measure_is_extrapolated(monkeypatch):
    clock = Clock(monkeypatch, lambda rows, n: rows * n * (1e-3 + 1e-6 * n))
    assert clock.speed(16384) == pytest.approx(1 / (1e-3 + 1e-6 * 16384))
    assert clock.now < 2 * MEASURING and max(n for _, n in clock.shapes) < 8192


def test_the_shortest_row_is_read_even_where_it_takes_long(monkeypatch):
    clock = Clock(monkeypatch, lambda rows, n: n * 1.0)
    assert clock.speed(4096) == pytest.approx(1)
    assert clock.shapes == [(1, 16), (1, 128)]


def test_rows_side_by_side_count_where_they_are_faster(monkeypatch):
    clock = Clock(monkeypatch, lambda rows, n: 1e-3 * n)  # as a GPU, which takes no longer for several rows
    assert clock.speed(128, rows=8) == pytest.approx(8e3)


def test_noise_never_makes_longer_rows_faster(monkeypatch):
    clock = Clock(monkeypatch, lambda rows, n: 0.1 if n == 128 else n * 1e-4)
    assert clock.speed(1 << 20) == pytest.approx(1e4)


def test_a_command_that_goes_on_reads_as_much_as_it_planned_at_first(monkeypatch, tmp_path):
    speeds = iter([1000.0, 10.0])
    monkeypatch.setattr(budget, "tokens_per_second", lambda *_, **__: next(speeds))
    model = tiny_model()
    planned = [tokens_within(model, 60, 64, tmp_path / "finished.jsonl") for _ in range(2)]
    assert planned == [SAFETY * 60 * 1000] * 2


def test_what_prompts_share_is_computed_once():
    spec = EvalSpec([64, 128], windows=3, samples=2, depths=(0.0, 0.25, 1.0), tasks=["passkey", "vt"])
    # 3 windows of 128; passkey: the prompt at depth 1, three quarters of the second, all of the first; vt: one.
    per_sample = 1 + 0.75 + 1 + 1
    assert spec.tokens_computed() == 3 * 128 + 2 * per_sample * (64 + 128)
    assert EvalSpec([64], windows=0, samples=2, depths=(0.0, 0.25, 1.0), mode="multikey").tokens_computed() == 2 * 64


@pytest.mark.parametrize("tokens", [500_000, 200_000, 100_000])
def test_a_spec_within_a_number_of_tokens_reads_no_more_and_as_much_as_it_can(tokens):
    spec = EvalSpec([4096, 8192], windows=16)
    smaller = spec.within(tokens)
    assert smaller.tokens_to_read() <= tokens and smaller.lengths == spec.lengths
    assert smaller.tokens_to_read() > tokens / 2 or smaller == spec
    assert smaller.windows >= 4 and smaller.samples >= 1 and smaller.depths == spec.depths
