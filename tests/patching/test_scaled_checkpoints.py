"""Checkpoints that are scaled already: twice the stated context is the stock config with its factor raised by hand."""

import json
import math

import pytest
import torch
from support.releases import BETAS, LINEAR, LLAMA3, RELEASES, C, every_release, release, yarn
from support.subsets import covering
from support.tiny import SIZE, logits, tiny_model
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.checkpoints.folder_patch import restore_folder
from rope_patch.patching.install import for_target

OWN = {"llama3": "llama3", "yarn": "yarn", "linear": "pi", "proportional": "pi"}
"""The method of the type that a checkpoint has."""


def raised(parameters, times=2):
    """The stock settings with their factor raised by hand; an attention factor that it implies follows."""
    if "rope_type" not in parameters:
        return {kind: raised(one, times) for kind, one in parameters.items()}
    if "factor" not in parameters:
        return parameters
    factor = parameters["factor"] * times
    implied = {"attention_factor": 0.1 * math.log(factor) + 1} if "attention_factor" in parameters else {}
    return {**parameters, "factor": factor, **implied}


def scaled_type(parameters):
    every = [parameters] if "rope_type" in parameters else parameters.values()
    return next(one["rope_type"] for one in every if one["rope_type"] != "default")


@torch.no_grad()
@pytest.mark.parametrize("name", every_release)
def test_a_method_of_the_own_type_is_the_stock_config_with_its_factor_raised(name, tmp_path):
    model = release(name)
    own = RELEASES[name][2]
    stated = model.config.max_position_embeddings
    stock = release(name, raised(own), times=2)
    stock.load_state_dict(model.state_dict())
    # The last 64 positions of twice the context.
    ids = torch.randint(SIZE["vocab_size"], (1, 64), generator=torch.Generator().manual_seed(1))
    read = {"input_ids": ids, "position_ids": torch.arange(2 * stated)[None, -64:]}
    before = model(**read).logits
    expected = stock(**read).logits
    assert not torch.equal(before, expected), "the factor moves what is read"
    patch = rope_patch.apply(model, OWN[scaled_type(own)], target_length=2 * stated)
    assert patch.method.factor == 2
    assert torch.equal(model(**read).logits, expected)
    assert model.config.rope_parameters == stock.config.rope_parameters
    rope_patch.save(model, tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(**read).logits, expected)
    assert rope_patch.doctor(tmp_path).ok
    rope_patch.restore(model)
    assert torch.equal(model(**read).logits, before)


def test_another_type_starts_from_the_plain_table_with_the_whole_factor():
    model = release("Llama 3.1")
    patch = rope_patch.apply(model, "yarn", target_length=256)
    assert "the 128 tokens that the config states; counted from the 16 tokens before any scaling it is 16" in str(patch)
    assert model.config.rope_parameters == yarn(16.0, 5e5, **BETAS)


@pytest.mark.parametrize(
    ("name", "method", "original", "stated"),
    [("Llama 3.1", "yarn", 64, "16"), ("Llama 3.1", "llama3", 64, "16"), ("Gemma 3 4B", "yarn", 256, "128")],
)
def test_a_context_before_the_scaling_that_contradicts_the_checkpoint_is_refused(name, method, original, stated):
    """With the whole factor over it there would be no scaling left, in silence."""
    model = release(name)
    before = model.config.to_json_string()
    with pytest.raises(ValueError, match=f"original_max_position_embeddings.*{stated}"):
        rope_patch.apply(model, method, target_length=256, original_max_position_embeddings=original)
    assert model.config.to_json_string() == before


@pytest.mark.parametrize("stated", [40, 32])
def test_yarn_that_a_card_adds_counts_from_what_it_reaches(stated):
    """Qwen's cards add YaRN with factor 4 over 32768 and leave the stated context at 40960 or 32768."""
    own = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}
    model = tiny_model("qwen3", max_position_embeddings=stated, rope_parameters=own)
    method = for_target(model, "yarn", 256)
    patch = rope_patch.apply(model, "yarn", target_length=256)
    assert patch.method == method
    assert "the 128 tokens that its own factor reaches; counted from the 32 tokens" in str(patch)
    assert (model.config.rope_parameters["factor"], model.config.max_position_embeddings) == (8.0, 256)
    rope_patch.restore(model)
    rope_patch.apply(model, "yarn", target_length=128)  # which needs the stated context alone
    assert (model.config.rope_parameters["factor"], model.config.max_position_embeddings) == (4.0, 128)


REACHING = {
    "yarn": yarn(16.0),
    "llama3": LLAMA3 | {"factor": 16.0},
    "linear": {**LINEAR, "original_max_position_embeddings": C},
}


@covering(
    method=["own", "pi", "yarn", "mrrope", "ntk", "llama3", "p_rope:p=1+pi", "pi+p_rope:p=1"],
    scaled=list(REACHING),
    stated=[16, 12, 64, 32],
)
def test_a_target_that_the_table_reaches_slows_nothing(method, scaled, stated):
    """The factor reaches 256 tokens, whatever context is stated: left at that before the scaling, or lowered."""
    settings = REACHING[scaled]
    model = tiny_model(max_position_embeddings=stated, rope_parameters=dict(settings))
    method = OWN[settings["rope_type"]] if method == "own" else method
    before, *_ = rope_patch.inspect(model).tables
    after = rope_patch.apply(model, method, target_length=128).after[None]
    assert model.config.max_position_embeddings == 128
    assert float(after.inv_freq[-1] / before.inv_freq[-1]) == pytest.approx(1, rel=1e-5)
    if "pi" in method or method == OWN[settings["rope_type"]]:
        assert torch.equal(after.inv_freq, before.inv_freq) and after.attention_scaling == before.attention_scaling


@pytest.mark.parametrize(("name", "scaling"), [("DeepSeek V3", 1.0), ("Ministral 3", 1.0), ("Qwen3 with YaRN", None)])
def test_another_method_keeps_the_ratio_of_the_two_mscales(name, scaling):
    """Attention of DeepSeek scales its logits already: 0.1 ln(80) + 1 on cos and sin would come on top."""
    model = release(name)
    stated = model.config.max_position_embeddings
    whole = 2 * RELEASES[name][1]
    (after,) = rope_patch.apply(model, "mrrope", target_length=2 * stated).after.values()
    assert after.attention_scaling == pytest.approx(scaling or 0.1 * math.log(whole) + 1)


def test_what_changes_the_attention_factor_alone_and_what_lowers_the_base_is_said(caplog):
    """As in Gemma 4, whose rotating pairs all make many turns within the context."""
    fast = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    model = tiny_model(head_dim=32, max_position_embeddings=4096, rope_parameters=fast)
    rope_patch.apply(model, "yarn", target_length=8192)
    assert "changes no frequency of model.rotary_emb" in caplog.text
    model = tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    rope_patch.apply(model, "abf")
    assert "abf:rope_theta=500000 lowers the base of model.rotary_emb from 1e+06 to 500000" in caplog.text


def test_a_restored_folder_says_what_transformers_4_reads(tmp_path):
    model = release("Llama 3.1")
    rope_patch.apply(model, "llama3", target_length=256)
    rope_patch.save(model, tmp_path / "patched")
    restore_folder(tmp_path / "patched", tmp_path / "restored")
    config = json.loads((tmp_path / "restored" / "config.json").read_text())
    assert config["rope_scaling"] == config["rope_parameters"] == RELEASES["Llama 3.1"][2]
    assert config["rope_theta"] == 5e5 and "rope_patch" not in config


def test_a_linear_factor_over_a_shorter_stated_context_is_refused_until_the_config_says_one(tmp_path):
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    model = tiny_model(max_position_embeddings=64, max_sequence_length=256, rope_parameters=linear)
    before = logits(model)
    with pytest.raises(ValueError, match="states two contexts"):
        rope_patch.apply(model, "pi", target_length=512)
    assert torch.equal(logits(model), before)
    model.save_pretrained(tmp_path / "16k")
    with pytest.raises(ValueError, match="states two contexts"):  # the export would state the shorter one everywhere
        rope_patch.export(tmp_path / "16k", tmp_path / "out", to="vllm")
    rope_patch.apply(model, "default")
