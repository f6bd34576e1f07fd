"""The comparison behind the demo, its figures and its table."""

from __future__ import annotations

import json

import pytest
import torch
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch.cli import bundled as demo
from rope_patch.methods import METHODS
from rope_patch.plots import base as plots


@pytest.fixture(scope="module")
def bundled():
    folder = rope_patch.data_path("assets") / "llama"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(
        folder
    )


def test_every_method_is_in_the_demo():
    named = {part.split(":")[0] for method in demo.METHODS for part in method.split("+")}
    assert named == set(METHODS) - {"table"}


@pytest.mark.slow
def test_quick_demo(tmp_path, reloads_fork):
    reads = []
    shown = demo.run("llama", tmp_path, quick=True, on_progress=lambda *read: reads.append(read))
    assert sum(tokens for _, tokens in reads) == demo.tokens_to_read(quick=True)
    assert shown.comparison.best().method == "yarn:factor=4"
    data = json.loads((tmp_path / "llama.json").read_text())
    assert [row["method"] for row in data["rows"]] == ["default", "yarn:factor=4", "nope"]
    default, yarn, nope = shown.comparison.rows
    assert yarn.scores.perplexity.between(256, 1024) < default.scores.perplexity.between(256, 1024) / 1.5
    assert (
        default.scores.perplexity.between(0, 256)
        < yarn.scores.perplexity.between(0, 256)
        < nope.scores.perplexity.between(0, 256)
    )
    assert [(c.metric, c.stop) for c in shown.comparison.columns()] == [
        ("perplexity", 256),
        ("perplexity", 1024),
        ("retrieval", 256),
        ("retrieval", 1024),
    ]
    saved = rope_patch.load(shown.saved)
    assert saved.config.max_position_embeddings == 1024
    assert str(rope_patch.verify(saved).record.to_method()) == "yarn:factor=4"


def test_an_unequal_reload_is_noticed(tmp_path, bundled):
    model, _ = bundled
    with rope_patch.patched(model, "yarn:factor=4"):
        rope_patch.save(model, tmp_path / "saved")
    assert not demo.reloads_equal(model, tmp_path / "saved")  # the model is no longer patched


def test_figures_have_units_and_every_line():
    curves = {f"m{i}": ([1.0, 2.0], [3.0 + i, 4.0 + i]) for i in range(12)}
    figure = plots.perplexity_by_position(curves, trained_length=2, title="t")
    assert isinstance(figure, Figure)
    (axes,) = figure.axes
    assert axes.get_xlabel() == "position [tokens]"
    assert axes.get_legend().get_texts()[0].get_text() == "m0  (4)"
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines[:12]}) == 12
