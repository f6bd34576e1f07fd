"""The suite for a GPU: numbers by hand; `python benchmarks/gpu.py --tiny` rehearses its stages."""

from __future__ import annotations

import importlib

import pytest

from rope_patch.planning import plan
from rope_patch.planning.shapes import shape_of

pytest.importorskip("gpu_stages", reason="not in the source distribution")
training = importlib.import_module("gpu_stages.training")


def test_shares_of_the_peak_by_hand():
    """Ten times the seconds of a plan that assumes 30 % of 989: 3 % of the same peak, 6 % of half of it."""
    planned = plan("Llama-3.1-8B", length=8192)
    done = training.step_flops(planned)
    seconds = 10 * done.executed / (0.3 * 989e12)
    found = training.speeds(planned, seconds, 989.0)
    assert found["executed"] == pytest.approx(0.03, abs=1e-4)
    rate = 8192 / seconds * (6 * shape_of("Llama-3.1-8B").parameters + 12 * 32 * 4096 * 8192)
    assert found["palm_mfu"] == pytest.approx(rate / 989e12, abs=1e-4)
    assert found["mfu"] == pytest.approx(done.model / seconds / 989e12, abs=1e-4)
    assert training.speeds(planned, seconds, 494.5)["executed"] == pytest.approx(0.06, abs=1e-4)
    assert training.speeds(planned, seconds, None)["palm_mfu"] is None
