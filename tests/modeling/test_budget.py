"""How much is read in a time, and by default: fewer tokens the larger a model is."""

from __future__ import annotations

import pytest
from tiny import tiny_model

from rope_patch.evaluation.spec import EvalSpec
from rope_patch.modeling.budget import Pace, default_tokens, measure_pace, pace_of_reading
from rope_patch.words import parse_duration


def test_twice_the_parameters_read_half_as_much():
    small, large = tiny_model(vocab_size=64), tiny_model(vocab_size=4096)
    ratio = sum(p.numel() for p in large.parameters()) / sum(p.numel() for p in small.parameters())
    assert ratio > 1.5
    assert default_tokens(small) / default_tokens(large) == pytest.approx(ratio, rel=1e-3)


def test_the_pace_of_a_model_is_measured_and_its_mode_is_kept():
    model = tiny_model().train()
    pace = pace_of_reading(model, 64, rows=4)
    assert pace.seconds(1, 64) > 0 and model.training


class Clock:
    """Stands still but for what reading takes."""

    def __init__(self, cost):
        self.now, self.cost, self.read = 0.0, cost, []

    def __call__(self, ids):
        self.read.append(tuple(ids.shape))
        self.now += self.cost(*ids.shape)

    def pace(self, monkeypatch, length, **options):
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        return measure_pace(self, length, **options)


def test_the_pace_grows_with_the_length_as_it_was_measured(monkeypatch):
    clock = Clock(lambda rows, n: rows * n * (1e-4 + 2e-8 * n))
    pace = clock.pace(monkeypatch, 1000)
    assert (pace.fixed, pace.growing) == (pytest.approx(1e-4), pytest.approx(2e-8))
    assert [n for _, n in clock.read] == [16, 128, 256, 512, 1000], "a first call, and rows that double"


def test_measuring_stops_in_time_and_what_is_longer_is_extrapolated(monkeypatch):
    clock = Clock(lambda rows, n: rows * n * (1e-3 + 1e-6 * n))
    pace = clock.pace(monkeypatch, 16384, seconds=2)
    assert clock.now < 8 and max(n for _, n in clock.read) < 4096
    assert pace.seconds(16384, 16384) == pytest.approx(16384 * (1e-3 + 1e-6 * 16384))


def test_more_time_is_taken_while_all_rows_are_far_shorter_than_the_longest(monkeypatch):
    # There is time for rows of up to 512 tokens, and for up to 2048 where it is four times as long.
    for length, longest in ((1000, 512), (2048, 1024), (8192, 2048), (16384, 2048)):
        clock = Clock(lambda rows, n: rows * n * 1e-3)
        clock.pace(monkeypatch, length, seconds=2)
        assert max(n for _, n in clock.read) == longest


def test_the_shortest_row_is_read_even_where_it_takes_long(monkeypatch):
    clock = Clock(lambda rows, n: n * 1.0)
    assert clock.pace(monkeypatch, 4096, seconds=1).seconds(100, 4096) == pytest.approx(100)
    assert clock.read == [(1, 16), (1, 128)]


def test_rows_side_by_side_count_where_they_are_faster(monkeypatch):
    clock = Clock(lambda rows, n: 1e-3 * n)  # as a GPU, which takes no longer for several rows
    assert clock.pace(monkeypatch, 128, rows=8).seconds(1, 128) == pytest.approx(1e-3 / 8)
    assert clock.read[-1] == (8, 128)


def test_what_a_reader_says_it_read_is_what_counts(monkeypatch):
    clock = Clock(lambda rows, n: 2e-3 * n)
    monkeypatch.setattr("time.perf_counter", lambda: clock.now)
    pace = measure_pace(lambda ids: clock(ids) or 2 * ids.numel(), 128)
    assert pace.seconds(1, 128) == pytest.approx(1e-3)


def test_noise_never_makes_longer_rows_faster(monkeypatch):
    clock = Clock(lambda rows, n: 0.1 if n == 128 else n * 1e-4)
    pace = clock.pace(monkeypatch, 1024)
    assert pace.growing == 0 and pace.fixed == pytest.approx(1e-4)


def test_the_time_of_a_spec_counts_what_prompts_share_once():
    pace = Pace(1.0, 0.5)
    spec = EvalSpec([64, 128], windows=3, samples=2, depths=(0.0, 0.25, 1.0), tasks=["passkey", "vt"])
    # 3 windows of 128; passkey: the prompt at depth 1, three quarters of the second, all of the first; vt: one.
    per_sample = 1 + 0.75 + 1 + 1
    assert spec.seconds(pace) == pytest.approx(3 * 128 * (1 + 64) + 2 * per_sample * (64 * (1 + 32) + 128 * (1 + 64)))
    joint = EvalSpec([64], windows=0, samples=2, depths=(0.0, 0.25, 1.0), mode="multikey")
    assert joint.seconds(pace) == pytest.approx(2 * 64 * (1 + 32))


def test_a_spec_within_a_time_takes_no_longer():
    pace = Pace(1e-3, 1e-6)
    spec = EvalSpec([4096, 8192], windows=16)
    smaller = spec.within(spec.seconds(pace) / 3, cost=lambda spec: spec.seconds(pace))
    assert spec.seconds(pace) / 6 < smaller.seconds(pace) <= spec.seconds(pace) / 3


@pytest.mark.parametrize("tokens", [500_000, 200_000, 100_000])
def test_a_spec_within_a_number_of_tokens_reads_no_more_and_as_much_as_it_can(tokens):
    spec = EvalSpec([4096, 8192], windows=16)
    smaller = spec.within(tokens)
    assert smaller.tokens_to_read() <= tokens and smaller.lengths == spec.lengths
    assert smaller.tokens_to_read() > tokens / 2 or smaller == spec
    assert smaller.windows >= 4 and smaller.samples >= 1 and smaller.depths == spec.depths


def test_what_was_chosen_is_not_lowered():
    spec = EvalSpec([4096], windows=16)
    smaller = spec.within(120_000, ["samples"])
    assert smaller.windows == 16 and smaller.samples < spec.samples
    assert spec.within(120_000, ["windows"]) == EvalSpec([4096], windows=9)


def test_a_smaller_spec_says_how_much_wider_intervals_get():
    spec = EvalSpec([4096], windows=16)
    assert spec.cost_of(spec) == ""
    sentence = spec.cost_of(EvalSpec([4096], windows=4, samples=2))
    assert sentence == (
        "2 instead of 4 samples at each length and depth, 4 instead of 16 windows: "
        "intervals are up to 3.0 times as wide"
    )


def test_the_longest_lengths_are_left_out_before_a_time_is_too_short():
    spec = EvalSpec([1024, 4096, 8192], windows=16)
    least = {n: EvalSpec(lengths, windows=4, samples=1).tokens_to_read()
             for n, lengths in ((1, [1024]), (2, [1024, 4096]), (3, [1024, 4096, 8192]))}  # fmt: skip
    assert spec.within(least[3]).lengths == (1024, 4096, 8192)
    smaller = spec.within(least[3] - 1)
    assert smaller.lengths == (1024, 4096) and smaller.windows > 4, "what is left is read as precisely as time allows"
    assert "; nothing is measured at 8192 tokens" in spec.cost_of(smaller)
    assert smaller.edges == [edge for edge in spec.edges if edge <= 4096], "positions are averaged over as before"
    alone = spec.within(least[1])
    assert alone.lengths == (1024,) and spec.cost_of(alone).endswith("nothing is measured at 4096 and 8192 tokens")


def test_a_time_that_is_too_short_for_the_shortest_length_says_how_much_is_needed():
    with pytest.raises(
        ValueError,
        match=r"^at least 36864 tokens would be read under each method or scheme, at 4096 tokens alone, and that is "
        r"36.9 times what fits",
    ):
        EvalSpec([4096, 8192]).within(1000)


@pytest.mark.parametrize("text", ["5", "m", "0m", "-5m", "5 m", "5d", ""])
def test_a_time_needs_a_number_and_a_unit(text):
    with pytest.raises(ValueError, match="a time is a number with s, m or h"):
        parse_duration(text)


def test_windows_go_down_alone_where_there_is_one_sample():
    assert EvalSpec([1024], samples=1, windows=16).smallest().windows == 4


def test_without_windows_prompts_alone_get_fewer():
    spec = EvalSpec([1024], windows=0)
    smaller = spec.within(11_000)
    assert (smaller.windows, smaller.samples) == (0, 2)
    assert "windows" not in spec.cost_of(smaller) and "1.4 times" in spec.cost_of(smaller)
