"""METHODS × ARCHITECTURES: what a patch does to a model, and that it can be undone."""

import copy
import logging
from dataclasses import dataclass

import pytest
import torch
from support.patches import cos_sin, method_for, module_of, patched_model
from support.round_trip import assert_same
from support.subsets import covering
from support.tiny import (
    ARCHITECTURES,
    DYNAMIC,
    MIXED_ARCHITECTURES,
    YARN,
    logits,
    tiny_config,
    tiny_model,
)
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import rope_patch
from rope_patch import METHODS, PatchError
from rope_patch.methods import Method
from rope_patch.patching.locate import locate

CONTEXT = {"original_max_position_embeddings": 64}
IDENTITIES = ("default", "longrope", "table")


def last_layer_type(family):
    return "full_attention" if family in MIXED_ARCHITECTURES else None


# The table of Gemma 4 is p-RoPE, which partial refuses.
@covering(family=ARCHITECTURES, name=list(METHODS), without=[("gemma4", "partial")])
def test_effect_shape_and_undo(family, name):
    model = tiny_model(family)
    stock = module_of(model)
    before = logits(model)
    config = model.config.to_json_string()
    parameters = copy.deepcopy(model.config.rope_parameters)
    with rope_patch.patched(model, method_for(name)) as patch:
        after = logits(model)
        kind = last_layer_type(family)
        cos, sin = cos_sin(model, torch.arange(5)[None], kind)
        assert cos.shape == sin.shape == (1, 5, patch.after[kind].rotary_dim)
        assert cos.dtype == torch.float32
        unchanged = all(torch.equal(patch.before[k].inv_freq, patch.after[k].inv_freq) for k in patch.after)
        assert unchanged or name not in IDENTITIES
        assert torch.equal(before, after) == unchanged
        assert not unchanged or model.config.rope_parameters == parameters
        rope_patch.verify(model)
    assert module_of(model) is stock
    assert model.config.to_json_string() == config
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("family", MIXED_ARCHITECTURES)
@pytest.mark.parametrize("name", ["yarn", "p_rope", "truncated"])
def test_other_layer_types_are_left_alone(family, name):
    model = tiny_model(family)
    positions = torch.arange(50)[None]
    before = cos_sin(model, positions, "sliding_attention")
    with rope_patch.patched(model, method_for(name)) as patch:
        assert patch.after["sliding_attention"] is patch.before["sliding_attention"]
        after = cos_sin(model, positions, "sliding_attention")
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        plain = tiny_config(family).rope_parameters["sliding_attention"]
        assert model.config.rope_parameters["sliding_attention"] == plain
    with rope_patch.patched(model, "pi:factor=4", layer_types=["sliding_attention"]):
        assert not torch.equal(cos_sin(model, positions, "sliding_attention")[0], before[0])


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
@pytest.mark.parametrize(
    ("method", "encoding"),
    [
        ("pi:factor=3", {"rope_type": "linear", "factor": 3.0}),
        ("p_rope:p=0.7", {"rope_type": "proportional", "partial_rotary_factor": 0.7}),
        ("yarn:factor=8:beta_fast=16", {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16.0, **CONTEXT}),
        (
            "llama3:factor=4",
            {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **CONTEXT},
        ),
    ],
)
def test_tables_are_those_of_transformers(family, method, encoding):
    """The reference is encoded by hand and built by transformers' own function, without this package."""
    kind = last_layer_type(family)
    config = tiny_config(family)
    theta = config.rope_parameters
    theta = (theta if kind is None else theta[kind])["rope_theta"]
    encoded = {"rope_theta": theta, **encoding}
    config.rope_parameters = encoded if kind is None else {**config.rope_parameters, kind: encoded}
    table, scaling = ROPE_INIT_FUNCTIONS[encoding["rope_type"]](config, layer_type=kind)
    model = tiny_model(family)
    patch = rope_patch.apply(model, method)
    assert torch.equal(module_of(model).table(kind), table)
    assert patch.after[kind].attention_scaling == scaling
    assert patch.after[kind].rope_type == encoding["rope_type"]


def test_p_rope_through_longrope_where_the_native_type_is_refused():
    model = tiny_model(
        "phi3", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    )
    # rotary_dim is 8 of head_dim 16: p = 0.5 keeps 2 of 4 pairs, 1 and 10000 ** -0.25 = 0.1
    patch = rope_patch.apply(model, "p_rope", p=0.5)
    assert patch.after[None].rope_type == "longrope"
    assert patch.after[None].inv_freq.tolist() == pytest.approx([1.0, 0.1, 0.0, 0.0])
    assert model.config.rope_parameters["partial_rotary_factor"] == 0.5


def test_gemma4_smaller_p_keeps_the_native_type():
    model = tiny_model("gemma4")
    # global head_dim 32 at factor 0.25 turns 4 of 16 pairs; p = 0.125 keeps 2
    patch = rope_patch.apply(model, "p_rope", p=0.125)
    assert patch.after["full_attention"].rope_type == "proportional"
    assert (patch.after["full_attention"].inv_freq > 0).sum() == 2


def test_undone_after_an_exception():
    model = tiny_model()
    before = logits(model)
    config = model.config.to_json_string()
    with pytest.raises(KeyboardInterrupt), rope_patch.patched(model, "nope"):
        raise KeyboardInterrupt
    assert torch.equal(logits(model), before)
    assert model.config.to_json_string() == config


def test_patching_twice():
    model = tiny_model()
    base = logits(model)
    first = rope_patch.apply(model, "pi", factor=2)
    with pytest.raises(PatchError, match="replace=True"):
        rope_patch.apply(model, "pi", factor=2)
    interpolated = logits(model)
    second = rope_patch.apply(model, "pi", factor=4, replace=True)
    assert torch.allclose(second.after[None].inv_freq * 2, first.after[None].inv_freq)
    with pytest.raises(PatchError, match="longer"):
        first.restore()
    second.restore()
    assert torch.equal(logits(model), interpolated)
    with rope_patch.patched(model, "nope", replace=True):
        pass
    assert torch.equal(logits(model), interpolated)
    rope_patch.restore(model)
    assert torch.equal(logits(model), base)
    with pytest.raises(PatchError, match="carries"):
        rope_patch.restore(model)


def test_models_that_share_a_config_object():
    first = tiny_model()
    second = type(first)(first.config)
    patch = rope_patch.apply(first, "pi", factor=2)
    with pytest.raises(PatchError, match="pi:factor=2"):
        rope_patch.apply(second, "pi", factor=2)
    with pytest.raises(PatchError, match="in use"):
        rope_patch.verify(second)
    rope_patch.apply(second, "ntk:factor=4", replace=True)
    with pytest.raises(PatchError, match="shared"):
        patch.restore()


def test_configs_that_are_apart_share_nothing_of_a_patch():
    model = tiny_model()
    module_of(model).config = copy.deepcopy(model.config)
    rope_patch.apply(model, "yarn:factor=4")
    model.config.rope_parameters["factor"] = 8.0
    assert module_of(model).config.rope_parameters["factor"] == 4.0


def test_a_table_off_by_a_hundred_thousandth_is_noticed():
    model = patched_model("pi:factor=4")
    plain = type(model)(model.config)
    rope_patch.verify(plain)
    module_of(plain).inv_freq.mul_(1 + 1e-5)
    with pytest.raises(PatchError, match="off"):
        rope_patch.verify(plain)


def test_a_lost_record_is_noticed():
    model = patched_model("pi:factor=4")
    del model.config.rope_patch
    for attempt in (rope_patch.verify, lambda model: rope_patch.apply(model, "pi:factor=4")):
        with pytest.raises(PatchError, match="record"):
            attempt(model)


@pytest.mark.parametrize("name", ["p_rope", "partial", "truncated", "longrope", "table"])
def test_ambient_dtype_and_device_play_no_part(name):
    expected = rope_patch.apply(tiny_model(), name).record
    model = tiny_model()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert rope_patch.apply(model, name).record == expected
        rope_patch.verify(model)
    finally:
        torch.set_default_dtype(torch.float32)
    other = tiny_model()
    with torch.device("meta"):
        assert rope_patch.apply(other, name).record == expected
        rope_patch.verify(other)


# --- what is found ---------------------------------------------------------------------------------------------------


def test_stock_attributes_are_there():
    model = tiny_model()
    stock = module_of(model)
    rope_patch.apply(model, "yarn:factor=4")
    ours = module_of(model)
    assert ours.config is stock.config
    assert ours.rope_type == "yarn"
    assert ours.inv_freq.shape == stock.inv_freq.shape
    assert ours.original_inv_freq.dtype == torch.float32
    assert ours.attention_scaling == pytest.approx(1.13863, abs=1e-5)  # 0.1 ln 4 + 1
    assert ours.max_seq_len_cached == stock.max_seq_len_cached
    mixed = patched_model("pi:factor=4", "gemma3")
    assert module_of(mixed).rope_type == {"full_attention": "linear", "sliding_attention": "default"}
    assert module_of(mixed).full_attention_inv_freq[0] == 0.25
    with pytest.raises(AttributeError):
        _ = module_of(mixed).inv_freq


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_table_is_repaired(dtype):
    model = tiny_model().to(dtype)
    exact = tiny_model().model.rotary_emb.inv_freq
    assert not torch.equal(module_of(model).inv_freq.float(), exact)
    assert f"rounded to {dtype} by a cast" in str(rope_patch.inspect(model))
    patch = rope_patch.apply(model, "default")
    assert torch.equal(patch.after[None].inv_freq, exact)


def test_an_edited_table_is_taken_as_found_and_kept():
    model = tiny_model()
    with torch.no_grad():
        module_of(model).inv_freq.mul_(0.5)
    edited = module_of(model).inv_freq.clone()
    before = logits(model)
    assert "is not the table its config describes" in str(rope_patch.inspect(model))
    patch = rope_patch.apply(model, "default")
    assert torch.allclose(patch.after[None].inv_freq, edited, rtol=2e-7)
    assert torch.allclose(logits(model), before, atol=1e-6)
    assert model.config.rope_parameters["rope_type"] == "longrope"


def test_a_config_edited_after_loading_does_not_change_what_is_used():
    model = tiny_model()
    before = logits(model)
    model.config.rope_parameters = dict(YARN)
    assert "is not the table its config describes" in str(rope_patch.inspect(model))
    patch = rope_patch.apply(model, "default")
    assert torch.allclose(logits(model), before, atol=1e-6)
    assert patch.after[None].attention_scaling == 1.0


def test_an_encoding_of_the_right_frequencies_with_another_attention_scaling_is_not_used(tmp_path):
    @dataclass(frozen=True)
    class Sharpened(Method):
        def inv_freq(self, table):
            return table.inv_freq / 4

        def scaling(self, table):
            return 1.25

        def rope_parameters(self, table):
            return {"rope_type": "linear", "rope_theta": table.rope_theta, "factor": 4.0}  # whose scaling is always 1

    model = patched_model(Sharpened())
    assert model.config.rope_parameters["rope_type"] == "longrope"
    model.save_pretrained(tmp_path)
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path), model)


def test_p_is_not_read_as_the_shape_of_attention(tmp_path):
    model = tiny_model("phi", partial_rotary_factor=1.0)
    rope_patch.apply(model, "p_rope", p=0.75)
    model.save_pretrained(tmp_path)
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path), model)


def test_dynamic_tables_are_refused_or_frozen():
    model = tiny_model(rope_parameters=DYNAMIC)
    with pytest.raises(ValueError, match="freeze_at"):
        rope_patch.apply(model, "default")
    reference, _ = ROPE_INIT_FUNCTIONS["dynamic"](model.config, seq_len=200)
    patch = rope_patch.apply(model, "default", freeze_at=200)
    assert torch.equal(patch.after[None].inv_freq, reference)
    assert patch.after[None].rope_type == "default"
    with pytest.raises(ValueError, match="dynamic"):
        rope_patch.apply(tiny_model(), "default", freeze_at=200)


def test_a_dynamic_table_frozen_within_the_context_is_the_unscaled_table():
    model = tiny_model(rope_parameters=DYNAMIC)
    patch = rope_patch.apply(model, "default", freeze_at=60)  # of 64, beyond which the table grows
    assert torch.equal(patch.after[None].inv_freq, module_of(tiny_model()).inv_freq)
    assert model.config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(("length", "expected"), [(64, 1.0), (65, 0.5)])
def test_two_longrope_tables_are_frozen_at_one(length, expected):
    two = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "partial_rotary_factor": 1.0,
    }
    model = tiny_model("phi3", rope_parameters=two, max_position_embeddings=256)
    with pytest.raises(ValueError, match="dynamic table"):
        rope_patch.apply(model, "default")
    patch = rope_patch.apply(model, "default", freeze_at=length)
    assert patch.after[None].inv_freq[0] == expected
    # sqrt(1 + ln(256 / 64) / ln 64) = 1.1547
    assert patch.after[None].attention_scaling == pytest.approx(1.154700, abs=1e-5)


def test_models_without_a_table_of_this_kind():
    gpt2 = tiny_model("gpt2")
    with pytest.raises(ValueError, match="GPT2LMHeadModel"):
        rope_patch.apply(gpt2, "p_rope")
    with pytest.raises(TypeError, match="transformers"):
        rope_patch.apply(torch.nn.Linear(2, 2), "p_rope")


def test_atomic_when_the_swap_fails():
    """The record is refused, after the module was put in and the table was written into the config."""
    model = tiny_model()
    stock = module_of(model)
    config = model.config.to_json_string()
    plain = type(model.config)

    class Refusing(plain):
        def __setattr__(self, name, value):
            if name == "rope_patch":
                assert module_of(model) is not stock and self.rope_parameters["rope_type"] == "proportional"
                raise RuntimeError("boom")
            super().__setattr__(name, value)

    model.config.__class__ = Refusing
    with pytest.raises(RuntimeError, match="boom"):
        rope_patch.apply(model, "p_rope")
    model.config.__class__ = plain
    assert module_of(model) is stock
    assert model.config.to_json_string() == config


def test_verify_names_what_differs():
    model = tiny_model()
    with pytest.raises(PatchError, match="carries"):
        rope_patch.verify(model)
    patch = rope_patch.apply(model, "pi", factor=4)
    rope_patch.verify(model)
    model.config.rope_parameters["factor"] = 2.0
    with pytest.raises(PatchError, match="config"):
        rope_patch.verify(model)
    model.config.rope_parameters["factor"] = 4.0
    model.set_submodule(locate(model).path, patch._location.module)
    with pytest.raises(PatchError, match="rad/token"):
        rope_patch.verify(model)


def test_the_keys_that_vllm_needs_are_no_reason_for_a_warning(tmp_path, caplog):
    model = tiny_model("llama")
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        rope_patch.apply(model, "mrrope", factor=4, target_length=256)
        assert model.config.rope_parameters["long_mscale"] > 1
        rope_patch.save(model, tmp_path / "saved")
        rope_patch.load(tmp_path / "saved")
        rope_patch.verify(tmp_path / "saved")
        assert "mscale" not in caplog.text
        LlamaConfig(rope_parameters=dict(model.config.rope_parameters, misspelt=1))  # the others are reported as ever
        assert "misspelt" in caplog.text
    finally:
        logger.removeHandler(caplog.handler)
