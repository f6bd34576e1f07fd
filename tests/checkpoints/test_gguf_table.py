"""The rotary table of a GGUF file: how a patch writes it, and how it is read back, of other tools' files too."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from support.gguf_files import rewritten, stated, write_toy
from support.tiny import YARN, tiny_model
from transformers import AutoModelForCausalLM

from rope_patch.checkpoints.gguf_file import Key, Piece, open_gguf
from rope_patch.checkpoints.gguf_patch import patch_gguf
from rope_patch.checkpoints.gguf_table import FREQS, LONG, SHORT, read_gguf
from rope_patch.methods import METHODS

F32 = gguf.GGMLQuantizationType.F32
PARAMETERS = {
    "longrope": ":factors=1/1/2/2/3/3/4/4",
    "table": ":values=1/0.5/0.2/0.1/0.05/0.02/0.01/0",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A GGUF of the tiny Llama: base 1e4, heads of 16, context 64."""
    return write_toy(tiny_model(), tmp_path_factory.mktemp("base") / "base.gguf")


def table_of(path):
    (table,) = read_gguf(path).tables
    return table


def factor(name, values):
    return Piece(name, (len(values),), F32, lambda: np.array(values, np.float32))


@pytest.mark.parametrize(
    ("method", "want"),
    # rope_theta 1e4, 8 pairs: 1e4 ** (-i / 8) over the frequency. PI by 4: 4 everywhere. p = 0.5 keeps 4 pairs of 8.
    [("pi:factor=4", [4.0] * 8), ("p_rope:p=0.5", [1.0] * 4 + [1e30] * 4), ("nope", [1e30] * 8)],
)
def test_the_tensor_holds_divisors(base, tmp_path, method, want):
    patch_gguf(base, method, tmp_path / "m.gguf")
    (factors,) = (tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors if tensor.name == FREQS)
    assert factors.tensor_type == F32
    assert factors.data.tolist() == pytest.approx(want, rel=2e-7)


@pytest.mark.parametrize("method", METHODS)
def test_every_table_is_read_back(base, tmp_path, method):
    change = patch_gguf(base, f"{method}{PARAMETERS.get(method, '')}", tmp_path / "m.gguf", target_length=256)
    found, expected = read_gguf(tmp_path / "m.gguf"), change.after[None]
    torch.testing.assert_close(found.tables[0].inv_freq, expected.inv_freq, rtol=3e-7, atol=0)
    assert found.tables[0].attention_scaling == pytest.approx(expected.attention_scaling, rel=1e-7)
    assert found.tables[0].max_position_embeddings == 256
    assert found.record.to_method() == change.method and not found.warnings


def test_a_plain_table_needs_no_factors(base, tmp_path):
    patch_gguf(base, "abf", tmp_path / "m.gguf")
    assert FREQS not in {piece.name for piece in open_gguf(tmp_path / "m.gguf").pieces}
    assert (table_of(tmp_path / "m.gguf").rope_theta, table_of(tmp_path / "m.gguf").rope_type) == (500000, "default")


def test_scaling_of_the_base_does_not_come_on_top(base, tmp_path):
    """The keys of a base that the engine would apply besides our factors, in every form that it reads."""
    linear = [Key.of("llama.rope.scale_linear", 2.0), Key.of("llama.rope.scaling.factor", 2.0)]
    patch_gguf(rewritten(base, tmp_path / "linear.gguf", linear), "p_rope:p=0.5", tmp_path / "m.gguf")
    # 1e4 ** (-i / 8) / 2 for the four pairs that turn
    expected = [0.5, 0.158114, 0.05, 0.0158114] + [0] * 4
    assert table_of(tmp_path / "m.gguf").inv_freq.tolist() == pytest.approx(expected, rel=1e-5)
    names = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert not [name for name in names if name.endswith(("scaling.factor", "scale_linear"))]


def test_yarn_that_is_left_to_the_engine_is_read_as_transformers_builds_it(base, tmp_path):
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    own = rewritten(
        base, tmp_path / "yarn.gguf", [Key.of(f"llama.rope.scaling.{name}", value) for name, value in keys.items()]
    )
    with torch.device("meta"):
        config = tiny_model(rope_parameters=YARN).config
    expected = AutoModelForCausalLM.from_config(config).model.rotary_emb
    torch.testing.assert_close(table_of(own).inv_freq, expected.inv_freq, rtol=3e-7, atol=0)
    assert table_of(own).attention_scaling == pytest.approx(expected.attention_scaling)


@pytest.mark.parametrize(
    ("keys", "factors", "word"),
    [
        ([], (LONG, SHORT), "two tables"),
        ([Key.of("llama.rope.dimension_count", 8)], (FREQS,), "4 pairs"),
        ([Key.of("general.type", "adapter")], (), "no model"),
        ([Key.of("split.count", 3)], (), "split"),
    ],
)
def test_what_cannot_be_read_as_one_table(base, tmp_path, keys, factors, word):
    added = [factor(name, [float(number + 1)] * 8) for number, name in enumerate(factors)]
    with pytest.raises(ValueError, match=word):
        read_gguf(rewritten(base, tmp_path / "m.gguf", keys, [*open_gguf(base).pieces, *added]))


@pytest.mark.parametrize(
    ("architecture", "keys", "message"),
    [
        ("gpt2", {}, "no rotary embeddings"),
        ("falcon-h1", {"attention.head_count": 0}, "how many features rotate"),
        ("qwen2", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "context_length": 0}, "states no context"),
        ("llama", {"rope.scaling.type": "dynamic"}, "llama.cpp knows none, linear, yarn, longrope"),
    ],
)
def test_files_of_others_without_a_table(tmp_path, architecture, keys, message):
    with pytest.raises(ValueError, match=message):
        read_gguf(stated(tmp_path / "m.gguf", architecture, **keys))
