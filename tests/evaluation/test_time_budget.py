"""How fast a model reads."""

import pytest
from support.tiny import tiny_model

from rope_patch.evaluation import time_budget as budget
from rope_patch.evaluation.time_budget import (
    MEASURING_SECONDS,
    operations,
    tokens_per_second,
)
from rope_patch.runtime.text import parse_duration


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


@pytest.mark.parametrize("duration", ["5", "m", "-5m", "5d", ""])
def test_a_time_needs_a_number_and_a_unit(duration):
    with pytest.raises(ValueError, match="number"):
        parse_duration(duration)
