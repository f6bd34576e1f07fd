"""Statistics of queries, keys and values against states stored by a route that the capture does not know."""

import copy
import json
import math
import re

import numpy
import peft
import pytest
import scipy.stats
import torch
from support.largest import Largest
from support.patches import lora
from support.scored import spy
from support.states import FAMILIES, INTERLEAVED, TOKENS, model_of, stored, text
from support.tiny import DYNAMIC, ids, tiny_model
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import rope_patch
from rope_patch.modeling import visit_states
from rope_patch.modeling.attention_probe import ROLES
from rope_patch.modeling.capture import capture


def direct(states, pairs, interleaved):
    """The statistics from stored states (tokens, heads, features), with NumPy and SciPy in double precision."""
    x = states.double().numpy()
    a = x[..., 0 : 2 * pairs : 2] if interleaved else x[..., :pairs]
    b = x[..., 1 : 2 * pairs : 2] if interleaved else x[..., pairs : 2 * pairs]
    angles = numpy.arctan2(b, a)
    between = {"high": math.pi, "low": -math.pi, "axis": 0}
    return {
        "mean": x.mean(0),
        "largest": abs(x).max(0),
        "mean_norm": numpy.hypot(a, b).mean(0),
        "circular_deviation": scipy.stats.circstd(angles, **between),
        "radius": numpy.hypot(a.mean(0), b.mean(0)),
    }


def assert_same(statistics, states, pairs, interleaved):
    """Compare with the direct computation; states may hold the rotating features alone."""
    for name, expected in direct(states, pairs, interleaved).items():
        got = getattr(statistics, name).numpy()
        if name in ("mean", "largest"):
            got = got[..., : states.shape[-1]]
        numpy.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5, err_msg=name)
    assert statistics.interleaved is interleaved


# --- the values


@pytest.mark.parametrize("name", FAMILIES)
def test_statistics_equal_those_of_stored_states(name, monkeypatch):
    model = model_of(name)
    row = text()
    states = stored(model, row, monkeypatch)
    got = capture(model, row)
    config = model.config
    assert [layer.index for layer in got.layers] == list(range(config.num_hidden_layers))
    assert (got.tokens, got.rows) == (TOKENS, 1)
    interleaved = name in INTERLEAVED
    for layer in got.layers:
        pairs = len(layer.inv_freq)
        assert_same(layer.query, states["query"][layer.index], pairs, interleaved)
        assert_same(layer.value, states["value"][layer.index], pairs, interleaved)
        # A layer that shares keys rotates none; those of the layer it names were rotated in that layer's turn.
        assert_same(layer.key, states["key"][layer.keys_of], pairs, interleaved)
        assert layer.query.heads == 4 and layer.groups == 4 // layer.key.heads
    shared = [2, 3] if name == "gemma4-shared" else []
    assert [layer.index for layer in got.layers if layer.keys_of != layer.index] == shared
    if shared:
        assert [layer.keys_of for layer in got.layers] == [0, 1, 0, 1]


def test_mean_norms_by_text_are_those_of_the_texts_alone():
    model = model_of("llama")
    rows = ids(20, 3)
    got = capture(model, rows, texts=[1, 0, 1])
    for text_number, own in ((0, rows[1:2]), (1, rows[[0, 2]])):
        alone = capture(model, own)
        for role in ROLES:
            norms = [getattr(layer, role).text_norm[:, text_number] for layer in got.layers]
            expected = [getattr(layer, role).mean_norm for layer in alone.layers]
            torch.testing.assert_close(norms, expected, rtol=1e-5, atol=1e-6)


def test_what_the_layers_say_of_attention():
    def attention_facts(name):
        return [
            (s.layer_type, len(s.inv_freq), s.context, s.scaling, s.softcap)
            for s in capture(model_of(name), ids(20, 1)).layers
        ]

    assert attention_facts("mistral") == [(None, 8, 32, 0.25, None)] * 2  # all layers slide
    assert attention_facts("gemma2") == [(None, 8, 16, 0.25, 50.0), (None, 8, 64, 0.25, 50.0)]
    assert attention_facts("gemma4") == [("sliding_attention", 8, 16, 1.0, None), ("full_attention", 16, 64, 1.0, None)]
    assert attention_facts("phi") == [(None, 4, 64, 0.25, None)] * 2


@pytest.mark.parametrize("method", ["p_rope:p=0.5", "yarn:factor=4", "pi:factor=2"])
def test_the_table_is_the_one_in_use(method):
    model = model_of("llama")
    row = text()
    stock = capture(model, row)
    with rope_patch.patched(model, rope_patch.parse(method)) as patch:
        got = capture(model, row)
        assert torch.equal(got.layers[1].inv_freq, patch.after[None].inv_freq)
        assert got.layers[1].attention_scaling == patch.after[None].attention_scaling
    assert not torch.equal(got.layers[1].inv_freq, stock.layers[1].inv_freq)
    # The first layer's states know no positions, those of the second do.
    assert torch.equal(got.layers[0].query.mean, stock.layers[0].query.mean)
    assert not torch.allclose(got.layers[1].query.mean, stock.layers[1].query.mean)


def test_a_table_rounded_by_a_cast_is_reported_as_it_is():
    model = model_of("llama")
    row = text()
    exact = capture(model, row).layers[0].inv_freq
    rounded = capture(model.to(torch.bfloat16), row).layers[0].inv_freq
    assert torch.equal(rounded, exact.bfloat16().float()) and not torch.equal(rounded, exact)


def test_bfloat16_states_are_reduced_in_float32(monkeypatch):
    model = model_of("qwen3").to(torch.bfloat16)
    row = text()
    states = stored(model, row, monkeypatch)
    got = capture(model, row)
    assert states["query"][0].dtype == torch.bfloat16
    for layer in got.layers:
        assert_same(layer.query, states["query"][layer.index], 8, False)
        assert_same(layer.key, states["key"][layer.index], 8, False)


def test_zero_vectors_do_not_dilute_a_direction():
    model = tiny_model("llama")
    with torch.no_grad():
        # The second features of key head 0, and the first one of its pair 3, which has no direction then: R is 0 there.
        model.model.layers[0].self_attn.k_proj.weight[[3, *range(8, 16)]] = 0.0
        model.model.embed_tokens.weight[10] = 0.0
        model.model.embed_tokens.weight[11] = 1.0
    key = capture(model, torch.tensor([10, 10, 10, 11])).layers[0].key
    # One token of four points anywhere: along the first feature, so R is 1 and not 1/4.
    assert key.circular_deviation[0].tolist() == pytest.approx([0, 0, 0, math.inf, 0, 0, 0, 0], abs=1e-3)
    assert key.circular_deviation[1].tolist() == pytest.approx([0] * 8, abs=1e-3)


def test_an_adapter_is_part_of_the_model():
    row = text()
    adapted = lora(model_of("llama"))
    got = capture(adapted, row)
    assert got.model == "LlamaForCausalLM"
    merged = capture(copy.deepcopy(adapted).merge_and_unload(), row)
    bare = capture(model_of("llama"), row)
    for layer, other, third in zip(got.layers, merged.layers, bare.layers, strict=True):
        torch.testing.assert_close(layer.query.mean, other.query.mean, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(layer.query.mean, third.query.mean, atol=1e-3)


def test_parts_that_put_out_the_same_on_the_probe_are_told_apart(monkeypatch):
    """The probe reads the first 8 tokens. There, the keys equal the values, and the norm changes nothing."""
    row = torch.cat((torch.full((8,), 9), text()[:20]))
    llama = model_of("llama")
    qwen = model_of("qwen3")
    with torch.no_grad():
        llama.model.embed_tokens.weight[9, 8:] = 0.0
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(llama.model.layers[0].self_attn, name).weight[:, :8] = 0.0
        attention = qwen.model.layers[0].self_attn
        inputs = qwen.model.layers[0].input_layernorm(qwen.model.embed_tokens.weight[9])
        for projection, norm in ((attention.q_proj, attention.q_norm), (attention.k_proj, attention.k_norm)):
            norm.weight.fill_(1.0)
            sizes = projection(inputs).view(-1, 16).square().mean(-1).sqrt()
            projection.weight.div_(sizes.repeat_interleave(16)[:, None])
    for model in (llama, qwen):
        states = stored(model, row, monkeypatch)
        layer = capture(model, row).layers[0]
        for role in ROLES:
            recorded = states[role][0].double()
            torch.testing.assert_close(getattr(layer, role).mean, recorded.mean(0), rtol=1e-5, atol=1e-5)


# --- what it leaves alone


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_model_attends_as_it_is_set(attention, monkeypatch):
    model = model_of("llama", attention=attention)
    row = text()
    query_counts = []
    if attention == "sdpa":
        attend = ALL_ATTENTION_FUNCTIONS["sdpa"]

        def spy_attention(module, query, *args, **kwargs):
            query_counts.append(query.shape[2])
            return attend(module, query, *args, **kwargs)

        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", spy_attention)
    capture(model, row)
    assert query_counts == ([TOKENS] * 2 if attention == "sdpa" else [])
    assert model.config._attn_implementation == attention


def test_the_model_is_left_as_it_was():
    model = model_of("llama", attention_dropout=0.5)
    row = text()[None]
    with torch.no_grad():
        before = model(row, use_cache=False).logits
    quiet = capture(model, row).layers[1].key.mean
    model.train()
    model.model.layers[0].eval()
    with spy(model.lm_head) as rows:
        assert torch.equal(capture(model, row).layers[1].key.mean, quiet), "without dropout"
    assert rows == [], "no logits"
    assert model.training and not model.model.layers[0].training and model.model.layers[1].training
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3] = math.nan
    with pytest.raises(ValueError, match="layer 1 of LlamaForCausalLM has a key"):
        capture(model, row)
    assert model.training and not model.model.layers[0].training
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks for module in model.modules())
    with torch.no_grad():
        fresh = model_of("llama")
        model.load_state_dict(fresh.state_dict())
        assert torch.equal(model.eval()(row, use_cache=False).logits, before)


# --- memory


def test_what_is_computed_on_the_way_is_a_slice_wide(monkeypatch):
    def rows(tensor):
        return len(tensor) if tensor.shape[1:] in ((4, 8), (2, 8)) else 0

    monkeypatch.setitem(visit_states.SLICE_TOKENS, "cpu", 16)
    model = model_of("llama")
    with Largest(rows) as seen:
        sliced = capture(model, text(90))
    assert 0 < seen.largest <= 16
    monkeypatch.undo()
    with Largest(rows) as seen:
        whole = capture(model, text(90))
    assert seen.largest == 90, "the measure sees what it should"
    for one, other in zip(sliced.layers, whole.layers, strict=True):
        torch.testing.assert_close(one.key.mean, other.key.mean, rtol=1e-6, atol=1e-7)


# --- files


def test_a_capture_is_written_as_plain_arrays(tmp_path):
    got = capture(model_of("gemma2"), text()[None])
    path = tmp_path / "some.npz"
    got.to_npz(path)
    with numpy.load(path, allow_pickle=False) as arrays:
        outline = json.loads(str(arrays["outline"]))
        assert (outline["model"], outline["tokens"]) == (got.model, got.tokens)
        assert len(outline["layers"]) == len(got.layers)
        for layer in got.layers:
            numpy.testing.assert_array_equal(arrays[f"layer{layer.index}.inv_freq"], layer.inv_freq)
            for role in ROLES:
                for name, value in vars(getattr(layer, role)).items():
                    if isinstance(value, torch.Tensor):
                        numpy.testing.assert_array_equal(arrays[f"layer{layer.index}.{role}.{name}"], value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["some.npz"]
    with pytest.raises(FileNotFoundError):
        got.to_npz(tmp_path / "missing" / "some.npz")


# --- bad input


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([5]), "a text must hold at least 2 tokens, got 1"),
        (torch.zeros(2, 3, 4, dtype=torch.long), "token_ids must be (tokens,) or (rows, tokens), got shape (2, 3, 4)"),
        (torch.rand(8), "token_ids must be whole numbers, got torch.float32"),
        (torch.tensor([5, 96]), "token ids must be in [0, 96), got 5 to 96"),
    ],
)  # fmt: skip
def test_bad_input(tokens, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        capture(tiny_model(), tokens)


def test_a_head_or_layer_that_was_not_captured():
    got = capture(tiny_model(), ids(8, 1))
    with pytest.raises(ValueError, match=re.escape("layers [0, 1], got 2")):
        got.layer(2)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gpt2", {}, "found no rotary table in GPT2LMHeadModel"),
        ("deepseek_v3", {}, "layer 0 of DeepseekV3ForCausalLM: its queries are no rotation of what a part of"),
        ("smollm3", {"num_hidden_layers": 4}, "layer 3 of SmolLM3ForCausalLM: its queries are no"),
        (
            "llama",
            {"rope_parameters": DYNAMIC},
            "has a dynamic table (rope_type 'dynamic')",
        ),
    ],
)  # fmt: skip
def test_models_that_cannot_be_read(family, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        capture(tiny_model(family, **changes), ids(8, 1))


def test_a_learned_prompt_is_refused():
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="learn a prompt or prefix"):
        capture(peft.get_peft_model(tiny_model(), config), ids(8, 1))


def test_a_module_exchanged_during_the_pass_is_noticed():
    model = tiny_model()
    row = ids(16, 1)
    attention = model.model.layers[1].self_attn
    calls = []

    def exchange(module, args):
        calls.append(1)
        if len(calls) == 2:  # the first pass is the probe
            attention.k_proj = copy.deepcopy(attention.k_proj)
            attention.k_proj._forward_hooks.clear()

    handle = model.model.layers[0].register_forward_pre_hook(exchange)
    with pytest.raises(RuntimeError, match="0 states of key of layer 1 were seen where 16"):
        capture(model, row)
    handle.remove()
