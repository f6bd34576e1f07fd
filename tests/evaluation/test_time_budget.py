"""How fast a model reads, and how much extend reads by default: fewer tokens the larger a model is."""

from __future__ import annotations

import pytest
from support.tiny import tiny_model

from rope_patch.evaluation import time_budget as budget
from rope_patch.evaluation.time_budget import (
    MEASURING_SECONDS,
    default_tokens,
    operations,
    speed,
    tokens_per_second,
)
from rope_patch.runtime.result_cache import ResultCache
from rope_patch.runtime.text import parse_duration


def test_twice_the_parameters_read_half_as_much():
    small = tiny_model(vocab_size=64)
    large = tiny_model(vocab_size=4096)
    ratio = sum(p.numel() for p in large.parameters()) / sum(p.numel() for p in small.parameters())
    assert ratio > 1.5
    assert default_tokens(small) / default_tokens(large) == pytest.approx(ratio, rel=1e-3)


def test_the_speed_of_a_model_is_measured_and_its_mode_is_kept():
    model = tiny_model().train()
    assert tokens_per_second(model, 64, rows=4) > 0 and model.training


@pytest.mark.parametrize(
    ("cost", "length", "rows", "speed"),
    [
        (lambda rows, n: n * 1.0, 1 << 20, 1, None),  # the shortest row is read even where it takes long
        (lambda rows, n: n * 1e-4, 1 << 20, 1, None),
        (lambda rows, n: n * 1e-4, 1024, 1, 1e4),
        (lambda rows, n: 1e-3 * n, 128, 8, 8e3),  # as a GPU, which takes no longer for several rows
    ],
)
def test_what_is_too_long_to_measure_is_extrapolated(monkeypatch, cost, length, rows, speed):
    """With a time that passes only while rows are read."""
    now = [0.0]
    shapes = []
    model = tiny_model()

    def read(reader, ids, first, chunk):
        shapes.append(tuple(ids.shape))
        now.append(now[-1] + cost(*ids.shape))

    monkeypatch.setattr("time.perf_counter", lambda: now[-1])
    monkeypatch.setattr(budget, "losses", read)
    measured = tokens_per_second(model, length, rows=rows)
    _, last = shapes[-1]
    speed = speed or last / cost(1, last) * operations(model, last) / operations(model, length)
    assert measured == pytest.approx(speed)
    assert now[-1] < 2 * MEASURING_SECONDS or shapes == [(1, 16), (1, 128)]


def test_a_token_takes_more_operations_the_more_it_attends_to():
    model = tiny_model()
    hybrid = tiny_model()
    weights = sum(p.numel() for p in model.parameters())
    width = model.config.hidden_size
    layers = model.config.num_hidden_layers
    assert operations(model, 1000) == weights + layers * width * 1000
    hybrid.config.layer_types = ["full_attention"] + ["sliding_attention"] * (layers - 1)
    assert operations(hybrid, 1000) == weights + width * 1000


def test_a_command_that_goes_on_reads_as_much_as_it_planned_at_first(monkeypatch, tmp_path):
    speeds = iter([10.0, 1000.0, 20.0])
    monkeypatch.setattr(budget, "tokens_per_second", lambda *_, **__: next(speeds))
    model = tiny_model()
    path = tmp_path / "finished.jsonl"

    def planned(chunk=None):
        return speed(model, 64, path, chunk=chunk)

    assert planned() == 10
    assert planned() == 1000, "nothing was finished under the first plan"
    ResultCache(path)["a window"] = 1.0
    assert planned() == 1000
    assert planned(chunk=16) == 20, "chunks are read at a speed of their own"


@pytest.mark.parametrize("duration", ["5", "m", "-5m", "5d", ""])
def test_a_time_needs_a_number_and_a_unit(duration):
    with pytest.raises(ValueError, match="number"):
        parse_duration(duration)
