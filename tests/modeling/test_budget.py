"""How much is read in a time, and by default: fewer tokens the larger a model is."""

from __future__ import annotations

import pytest
from tiny import tiny_model

from rope_patch.evaluation.spec import EvalSpec
from rope_patch.modeling.budget import default_tokens, tokens_per_second
from rope_patch.words import parse_duration


def test_twice_the_parameters_read_half_as_much():
    small, large = tiny_model(vocab_size=64), tiny_model(vocab_size=4096)
    ratio = sum(p.numel() for p in large.parameters()) / sum(p.numel() for p in small.parameters())
    assert ratio > 1.5
    assert default_tokens(small) / default_tokens(large) == pytest.approx(ratio, rel=1e-3)


def test_the_speed_of_a_model_is_measured_and_its_mode_is_kept():
    model = tiny_model().train()
    assert tokens_per_second(model, 64, 0.01) > 1
    assert model.training


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


def test_a_time_that_is_too_short_says_how_much_is_needed():
    with pytest.raises(
        ValueError, match=r"^at least 94208 tokens would be read under each method or scheme, and 1000 fit"
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
