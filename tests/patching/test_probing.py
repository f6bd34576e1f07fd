"""A patch that would change nothing, or that a model could not run with, is refused before anything is changed."""

import re

import pytest
import torch
from support.patches import config_of, edit_json, module_of, patched_model
from support.round_trip import assert_round_trip
from support.subsets import full
from support.tiny import DYNAMIC, LLAMA3, SIZE, ids, logits, tiny_model
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaForCausalLM,
)
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention

import rope_patch
from rope_patch.checkpoints.model_without_weights import model_without_weights
from rope_patch.patching import locate as locating


def refused(model, message, method="p_rope:p=0.5", **options):
    """A patch is refused, and the model is as it was."""
    before = logits(model)
    config = model.config.to_json_string()
    original = module_of(model)
    with pytest.raises(ValueError, match=message):
        rope_patch.apply(model, method, **options)
    assert model.config.to_json_string() == config and module_of(model) is original
    assert torch.equal(logits(model), before)


# --- tables that nothing uses -----------------------------------------------------------------------------------------


def test_a_falcon_with_alibi_is_refused():
    refused(tiny_model("falcon", alibi=True), "FalconForCausalLM")
    rope_patch.apply(tiny_model("falcon"), "p_rope:p=0.5")


def test_a_smollm3_without_rotary_layers_is_refused():
    refused(tiny_model("smollm3", no_rope_layers=[0, 0]), "no layer")
    rope_patch.apply(tiny_model("smollm3", no_rope_layers=[0, 1]), "p_rope:p=0.5")  # the last layer does


def test_the_users_weights_and_random_numbers_are_left_alone(monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr(LlamaForCausalLM, "forward", lambda *_, **__: pytest.fail("the model itself was run"))
    model.model.forward = model.forward  # instance attributes, as hooks of accelerate leave them
    state = torch.get_rng_state()
    locating._probes.clear()
    rope_patch.apply(model, "p_rope:p=0.5")
    assert torch.equal(torch.get_rng_state(), state)


def test_a_patched_model_is_not_probed_again(monkeypatch):
    """The copy is built from the settings before the patch, so the probe of the unpatched model is that of this one."""
    model = tiny_model("qwen2")
    rope_patch.apply(model, "yarn:factor=4")
    monkeypatch.setattr(locating, "probe", lambda *_: pytest.fail("probed again"))
    rope_patch.apply(model, "p_rope:p=0.5", replace=True)
    rope_patch.restore(model)


def test_a_model_in_inference_mode_and_one_without_weights():
    locating._probes.clear()
    with torch.inference_mode():
        rope_patch.apply(tiny_model("qwen2"), "p_rope:p=0.5")
    locating._probes.clear()
    with torch.device("meta"):
        rope_patch.apply(tiny_model("qwen2"), "p_rope:p=0.5")


# --- what the model asks of its rotary embedding ----------------------------------------------------------------------


def test_a_family_that_keeps_float32_is_kept_in_float32(tmp_path):
    """OLMo's cos and sin are float32 whatever the model computes in; cast as Llama's are, its logits moved by 3 %."""
    tiny_model("olmo2").save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    before = logits(model)
    with rope_patch.patched(model, "default"):
        assert torch.equal(logits(model), before)
    rope_patch.apply(model, "yarn:factor=4")
    rope_patch.save(model, tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert torch.equal(logits(plain), logits(model))
    x = torch.zeros(1, dtype=torch.bfloat16)
    for patched, dtype in ((patched_model("p_rope"), torch.bfloat16), (model, torch.float32)):
        assert {part.dtype for part in module_of(patched)(x, torch.arange(4)[None])} == {dtype}


def test_two_readers_of_one_config_are_refused():
    from transformers import MoonshineConfig, MoonshineForConditionalGeneration

    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 96, "pad_token_id": 0}
    heads = {
        f"{part}_num_{what}": 2 for part in ("encoder", "decoder") for what in ("hidden_layers", "attention_heads")
    }
    torch.manual_seed(0)
    model = MoonshineForConditionalGeneration(MoonshineConfig(**sizes, **heads)).eval()
    with pytest.raises(ValueError, match="MoonshineForConditionalGeneration"):
        rope_patch.apply(model, "p_rope:p=0.5")


# --- configs of their own kind ----------------------------------------------------------------------------------------


def test_a_config_that_holds_infinity(tmp_path):
    sizes = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}
    model = tiny_model("bamba", **sizes, attn_layer_indices=[1])
    assert model.config.time_step_limit[1] == float("inf")
    assert_round_trip(model, tmp_path, "yarn:factor=4")


def test_a_static_table_that_a_config_calls_dynamic(tmp_path):
    """HunYuan's alpha stretches the base once and for all."""
    alpha = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4}
    model = tiny_model("hunyuan_v1_dense", head_dim=16, rope_parameters=alpha)
    before = logits(model)
    with rope_patch.patched(model, "default"):
        assert torch.equal(logits(model), before)
    with pytest.raises(ValueError, match="freeze_at"):
        rope_patch.apply(model, "default", freeze_at=64)
    assert_round_trip(model, tmp_path, "pi:factor=4")


def test_a_table_with_learned_weights_is_refused():
    model = tiny_model()
    module_of(model).alpha = torch.nn.Parameter(torch.zeros(8))  # a patched module would lose it
    refused(model, "alpha")


# --- what changes nothing is said -------------------------------------------------------------------------------------


def heard(monkeypatch):
    warnings = []
    monkeypatch.setattr(rope_patch.patching.install.logger, "warning", warnings.append)
    return warnings


@pytest.mark.parametrize(
    ("family", "window", "said"), [("mistral", 32, 1), ("mistral", None, 0), ("mistral", 65, 0), ("gemma3", 16, 0)]
)
def test_a_context_that_no_layer_attends_to_is_said(family, window, said, tmp_path, monkeypatch):
    warnings = heard(monkeypatch)
    model = tiny_model(family, sliding_window=window)
    model.save_pretrained(tmp_path)
    sentences = [*rope_patch.inspect(model).warnings, *(check.found for check in rope_patch.doctor(tmp_path).checks)]
    assert sum("window of 32 tokens" in sentence for sentence in sentences) == 2 * said
    rope_patch.apply(model, "yarn:factor=4", target_length=256)
    assert len(warnings) == said


def location_of(family, **values):
    """Where a model without weights, of a family's own sizes, has its table."""
    if family not in CONFIG_MAPPING:
        pytest.skip("this release of transformers does not have the family")
    with torch.device("meta"):
        config = AutoConfig.for_model(family, num_hidden_layers=8, **values)
        return locating.locate(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize(
    "family",
    [
        *("cohere2", "exaone4", "llama4_text", "mistral"),
        *map(full, ("afmoe", "beam", "cohere2_moe", "exaone_moe", "flint", "kolibri1")),
    ],
)
def test_a_family_whose_layers_rotate_within_a_window_alone_is_found(family):
    location = location_of(family, max_position_embeddings=16384)
    assert location.windowed is not None
    window = getattr(location.config, "sliding_window", None) or location.config.attention_chunk_size
    assert (
        f" {window} tokens" in location.windowed and f" {location.config.max_position_embeddings} " in location.windowed
    )
    with pytest.raises(ValueError, match="apply MODEL default --target-length"):
        location.check_windowed()


@pytest.mark.parametrize(
    "family",
    ["gemma2", "gpt_oss", "modernbert-decoder", "smollm3", *map(full, ("gemma3_text", "gemma4_text", "mimo_v2_flash"))],
)
def test_a_family_with_a_layer_that_rotates_and_sees_all_says_nothing_new(family):
    location = location_of(family)
    assert location.windowed is None and not location.warnings
    location.check_windowed()


def test_a_context_within_the_window_is_seen_as_a_whole():
    assert location_of("cohere2", max_position_embeddings=4095).windowed is None


attend = Gemma2Attention.forward


def fails(attention, *args, **kwargs):
    raise NotImplementedError


def by_itself(attention, *args, **kwargs):
    attention.config._attn_implementation_internal = "eager"
    return attend(attention, *args, **kwargs)


@pytest.mark.parametrize("alone", [fails, by_itself])
def test_a_layer_that_does_not_say_what_it_sees_may_see_all(alone, monkeypatch):
    def full_layers_alone(attention, *args, **kwargs):
        attention.config._attn_implementation_internal = "rope_patch_rotates"
        if attention.sliding_window is not None:
            return attend(attention, *args, **kwargs)
        return alone(attention, *args, **kwargs)

    locating._probes.clear()
    monkeypatch.setattr(Gemma2Attention, "forward", full_layers_alone)
    assert location_of("gemma2").windowed is None
    locating._probes.clear()


def test_a_window_that_is_no_number_is_that_of_no_layer(monkeypatch):
    warnings = heard(monkeypatch)
    model = tiny_model()
    model.config.sliding_window = "auto"  # which Llama does not read
    rope_patch.apply(model, "yarn:factor=4", target_length=256)
    assert not warnings


def test_a_method_that_leaves_the_table_as_it_was_is_said_and_recorded(monkeypatch):
    warnings = heard(monkeypatch)
    model = tiny_model()
    patch = rope_patch.apply(model, "truncated:context=1000000")  # within which every pair turns
    assert len(warnings) == 1 and "as it was" in warnings.pop()
    assert patch.record.changed is False and model.config.rope_patch["changed"] is False
    assert rope_patch.apply(tiny_model(), "default").record.changed is False  # which says so by its name
    assert rope_patch.apply(model, "truncated:context=64", replace=True).record.changed is True
    assert not warnings


@pytest.mark.parametrize(
    ("word", "family", "method", "options"),
    [
        ("layer", "gemma3", "p_rope", {"layer_types": ()}),
        ("layer", "gemma3", "p_rope", {"layer_types": ["global"]}),
        ("layer", "gemma3", "table:layer_type=sliding_attention:attention_scaling=2", {}),
        ("layer", "llama", "table:layer_type=full:values=1/0.5", {}),
        ("one table", "llama", "yarn", {"layer_types": ["full_attention"]}),
        ("target_length", "llama", "yarn", {"target_length": 0}),
        ("per pair", "llama", "table", {"values": [1.0, 0.5]}),
    ],
)
def test_bad_input_is_refused(word, family, method, options):
    refused(tiny_model(family), word, method, **options)


def test_a_target_is_checked_and_a_factor_left_out_filled_in(monkeypatch):
    warnings = heard(monkeypatch)
    model = tiny_model()
    patch = rope_patch.apply(model, "yarn", target_length=512)
    assert patch.method == rope_patch.Yarn(factor=8) and patch.record.method["factor"] == 8.0
    patch.restore()
    refused(model, "factor=8", "yarn:factor=4", target_length=512)
    refused(model, "64", "default", target_length=20)
    assert not warnings
    patch = rope_patch.apply(model, "yarn:factor=4")  # the checkpoint still states 64 tokens
    assert len(warnings) == 1 and warnings[0] in str(patch)
    assert re.findall(r"\d+", warnings[0]) == ["4", "256", "64", "256"], "the factor, what it reaches, what is stated"
    assert repr(patch) == "<Patch yarn:factor=4>"


def test_a_record_is_carried_out_as_it_is(tmp_path):
    """Whatever the rule on targets says today: a folder of yesterday holds a table that somebody trained with."""
    model = patched_model("yarn:factor=8", target_length=512)
    rope_patch.save(model, tmp_path / "out")

    def lengthen(config):
        config["max_position_embeddings"] = config["rope_patch"]["target_length"] = 4096

    edit_json(tmp_path / "out" / "config.json", lengthen)
    assert rope_patch.load(tmp_path / "out").config.max_position_embeddings == 4096


# --- encoders and decoders --------------------------------------------------------------------------------------------


def t5gemma():
    from transformers import T5GemmaConfig, T5GemmaForConditionalGeneration

    part = SIZE | {"head_dim": 16}
    torch.manual_seed(0)
    return T5GemmaForConditionalGeneration(T5GemmaConfig(encoder=dict(part), decoder=dict(part), vocab_size=96)).eval()


def test_the_decoder_of_an_encoder_decoder_is_patched_saved_and_read(tmp_path, monkeypatch):
    from transformers import AutoModelForSeq2SeqLM

    warnings = heard(monkeypatch)
    model = t5gemma()
    tokens = ids(48) % 96
    rope_patch.apply(model, "yarn", target_length=256)
    assert any("model.encoder.rotary_emb" in line for line in warnings)  # which keeps its table
    rope_patch.save(model, tmp_path)
    config = config_of(tmp_path)
    assert config["decoder"]["rope_scaling"] == config["decoder"]["rope_parameters"]
    assert "rope_scaling" not in config
    plain = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    with torch.no_grad():
        both = [m(input_ids=tokens, decoder_input_ids=tokens).logits for m in (plain, model)]
    assert torch.equal(*both)
    rope_patch.verify(plain)
    for load in (rope_patch.load, model_without_weights):
        with pytest.raises(ValueError, match="class"):
            load(tmp_path)


# --- tables that are scaled already -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["yarn", "ntk", "llama3"])
def test_a_frozen_dynamic_table_counts_as_scaled(method):
    """Taken for a plain one of the base it grew to, a second scaling would stand on the first."""
    options = {"target_length": 256, "freeze_at": 256}
    model = tiny_model(rope_parameters=DYNAMIC)
    refused(model, "config.json", method, **options)
    rope_patch.apply(model, "pi", **options)


def test_a_target_below_what_a_scaled_checkpoint_reaches_is_refused():
    model = tiny_model(rope_parameters=LLAMA3, max_position_embeddings=512)
    for method in ("pi", "p_rope:p=0.5"):
        refused(model, "512", method, target_length=256)


# --- edits after a patch ----------------------------------------------------------------------------------------------


def test_edits_of_the_config_are_named_when_they_are_dropped(monkeypatch):
    model = patched_model("pi:factor=2", target_length=128)
    model.config.rope_parameters["factor"] = 4.0
    model.config.max_position_embeddings = 256
    warnings = heard(monkeypatch)
    patch = rope_patch.apply(model, "default", replace=True)
    assert "max_position_embeddings is 256, the record says 128" in warnings[0] and "factor is 4.0" in warnings[0]
    assert patch.after[None].rope_type == "default" and model.config.max_position_embeddings == 64
