"""The comparison behind the demo, its figures and its table."""

from __future__ import annotations

import json

import pytest
import torch
from matplotlib.figure import Figure
from test_surgery import module_of
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch import demo, plots
from rope_patch.evaluation.compare import compare
from rope_patch.registry import METHODS


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
def test_quick_demo(tmp_path):
    told = []
    shown = demo.run("llama", tmp_path, quick=True, progress=lambda name, tokens: told.append((name, tokens)))
    assert sum(tokens for _, tokens in told) == demo.tokens_to_read(quick=True)
    assert shown.comparison.best().method == "yarn:factor=4"
    data = json.loads((tmp_path / "llama.json").read_text())
    assert [row["method"] for row in data["rows"]] == ["default", "yarn:factor=4", "nope"]
    default, yarn, nope = shown.comparison.rows
    assert yarn.perplexity.between(256, 1024) < default.perplexity.between(256, 1024) / 1.5
    assert default.perplexity.between(0, 256) < yarn.perplexity.between(0, 256) < nope.perplexity.between(0, 256)
    for figure in shown.figures:
        assert figure.read_bytes().startswith(b"\x89PNG")
    header, rows = demo.table_rows(shown.comparison)
    assert header == ["method", "ppl 0-256", "ppl 256-1024", "passkey 256", "passkey 1024"]
    assert rows[1][0] == "yarn:factor=4"
    saved = rope_patch.load(shown.saved)
    assert saved.config.max_position_embeddings == 1024
    assert str(rope_patch.verify(saved).to_method()) == "yarn:factor=4"


def test_an_unequal_reload_is_noticed(tmp_path, bundled):
    model, _ = bundled
    with rope_patch.patched(model, "yarn"):
        rope_patch.save(model, tmp_path / "saved")
    assert not demo.reloads_equal(model, tmp_path / "saved")  # the model is no longer patched


def test_compare_refuses_before_it_measures_and_leaves_the_model_alone(bundled):
    model, tokenizer = bundled
    stock, read = module_of(model), []
    options = {"lengths": (64,), "windows": 1, "samples": 1, "progress": lambda name, n: read.append(n)}
    with pytest.raises(ValueError, match="one number per pair"):
        compare(model, tokenizer, ["default", "table:values=1/2"], **options)
    with pytest.raises(ValueError, match="at least one method"):
        compare(model, tokenizer, [], **options)
    with pytest.raises(ValueError, match="ask for fewer windows"):
        compare(model, tokenizer, ["default"], **{**options, "windows": 10**6})
    assert read == []
    result = compare(model, tokenizer, ["default", "pi"], **options)
    assert module_of(model) is stock
    assert json.loads(result.to_json())["trained_length"] == 256
    assert read == [64] * (2 + 2 * 5)


def test_between_merges_whole_buckets(bundled):
    model, tokenizer = bundled
    options = {"lengths": (64,), "windows": 2, "samples": 1}
    fine = compare(model, tokenizer, ["default"], bucket=16, **options).rows[0].perplexity
    coarse = compare(model, tokenizer, ["default"], bucket=64, **options).rows[0].perplexity
    assert fine.between(0, 64) == pytest.approx(coarse.buckets[0].perplexity)
    with pytest.raises(ValueError, match="not made of whole buckets"):
        fine.between(0, 24)


def test_figures_have_units_and_every_line():
    curves = {f"m{i}": ([1.0, 2.0], [3.0 + i, 4.0 + i]) for i in range(12)}
    figure = plots.perplexity_by_position(curves, trained_length=2, title="t")
    assert isinstance(figure, Figure)
    (axes,) = figure.axes
    assert axes.get_xlabel() == "position [tokens]"
    assert axes.get_legend().get_texts()[0].get_text() == "m0  (4)"
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines[:12]}) == 12
    tables = {"found": torch.tensor([1.0, 0.1]), "p": torch.tensor([1.0, 0.0])}
    (axes,) = plots.wavelengths(tables, context=100, title="t").axes
    assert axes.get_ylabel() == "wavelength [tokens]"
    assert any(list(line.get_ydata()) == [100, 100] for line in axes.lines)
    found, p, still = axes.lines[0], axes.lines[1], axes.lines[2]
    assert found.get_ydata()[1] == pytest.approx(62.83185)
    assert len(p.get_ydata()) == 1
    assert still.get_ydata()[0] > 62.9
