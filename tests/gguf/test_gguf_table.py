"""The rotary table of a GGUF file: how a patch writes it, and how it is read back, of other tools' files too."""

import gguf
import numpy as np
import pytest
import torch
from support.gguf_files import rewritten, stated, write_toy
from support.tiny import YARN, tiny_model
from transformers import AutoModelForCausalLM

from rope_patch import PatchError, doctor
from rope_patch.gguf.patch import patch_gguf
from rope_patch.gguf.table import FREQS, LONG, SHORT, read_gguf
from rope_patch.methods import METHODS
from rope_patch.runtime.gguf_file import Key, Piece, open_gguf

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
    found = read_gguf(tmp_path / "m.gguf")
    expected = change.after[None]
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


def test_both_tables_of_gemma_3_and_its_window_are_read(tmp_path):
    """Every sixth layer attends to all, with the base 1e6; others to a window, with 1e4, as llama.cpp takes it."""
    keys = {"block_count": 18, "attention.sliding_window": 512, "rope.freq_base": 1e6, "attention.key_length": 256}
    found = read_gguf(stated(tmp_path / "m.gguf", "gemma3", **keys))
    assert [(table.layer_type, table.rope_theta, table.pairs) for table in found.tables] == [
        ("full_attention", 1e6, 128),
        ("sliding_attention", 1e4, 128),
    ]
    assert "sliding window 512" in str(found)


def test_yarn_of_gemma_3_leaves_its_sliding_layers_alone(tmp_path):
    """llama.cpp scales them by 1, for which YaRN's attention factor is 1: as a folder of Gemma 3 means it."""
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "attention.sliding_window": 16}
    full, sliding = read_gguf(stated(tmp_path / "m.gguf", "gemma3", **yarn)).tables
    assert full.attention_scaling == pytest.approx(1.138629)
    assert sliding.is_geometric


def test_ends_of_the_ramp_that_no_loader_reads_are_none_of_the_table(tmp_path):
    """llama.cpp's converter writes yarn_beta_slow; of the families here no loader reads it, and Grok's does."""
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    ramps = yarn | {"rope.scaling.yarn_beta_slow": 0.1}
    plain = table_of(stated(tmp_path / "plain.gguf", "qwen2", **yarn))
    ramped = table_of(stated(tmp_path / "ramped.gguf", "qwen2", **ramps))
    assert torch.equal(plain.inv_freq, ramped.inv_freq)
    with pytest.raises(ValueError, match="settings of its own"):
        read_gguf(stated(tmp_path / "grok.gguf", "grok", **ramps))


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


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("names", [(FREQS,), (LONG, SHORT)])
def test_a_factor_that_is_no_number_above_0_is_a_fault(base, tmp_path, names, value):
    added = [factor(name, [1.0] * 7 + [value]) for name in names]
    path = rewritten(base, tmp_path / "m.gguf", [], [*open_gguf(base).pieces, *added])
    found = doctor(path)
    assert found.status == 1 and "factors" in found.found("differs")[0].found
    with pytest.raises(PatchError, match="factors"):
        patch_gguf(path, "abf:factor=4", tmp_path / "out.gguf")


def test_a_factor_that_stops_a_pair_is_none(base, tmp_path):
    path = rewritten(base, tmp_path / "m.gguf", [], [*open_gguf(base).pieces, factor(FREQS, [1.0] * 7 + [1e30])])
    assert doctor(path).ok and float(table_of(path).inv_freq[-1]) == 0


@pytest.mark.parametrize(("names", "noted"), [((), True), ((LONG, SHORT), False)])
def test_longrope_without_its_factors_is_noted(base, tmp_path, names, noted):
    added = [factor(name, [1.0] * 7 + [2.0]) for name in names]
    keys = [Key.of("llama.rope.scaling.type", "longrope")]
    found = doctor(rewritten(base, tmp_path / "m.gguf", keys, [*open_gguf(base).pieces, *added]))
    assert found.ok and ("rotary factors" in [check.name for check in found.checks]) == noted


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
