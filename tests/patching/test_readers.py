"""Families whose attention reads the config besides the rotary embedding: the table changes, and nothing else."""

import math

import pytest
import torch
from support.round_trip import assert_cached_equals_full, assert_round_trip
from support.states import model_of
from support.subsets import covering
from support.tiny import LAYOUTS, PLAIN, YARN, logits, tiny_config
from transformers import AutoModelForCausalLM, LlamaForCausalLM, MixtralForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mixtral.modeling_mixtral import MixtralAttention

import rope_patch
from rope_patch.engines.encodings import config_keys
from rope_patch.patching.locate import locate

FAMILIES = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v3-halves",
    "deepseek_v3-yarn",
    "minicpm3",
    "minicpm3-longrope",
    "ministral3",
)
every_family = pytest.mark.parametrize("family", FAMILIES)
METHODS = ("p_rope:p=0.5", "yarn:factor=80", "pi:factor=2")


@every_family
def test_identity(family):
    model = model_of(family)
    before = logits(model)
    for same in ("default", "p_rope:p=1"):
        with rope_patch.patched(model, same):
            assert torch.equal(logits(model), before)


# A method that starts from the base refuses divisors that no formula gives.
@covering(family=list(FAMILIES), method=METHODS, without=[("minicpm3-longrope", "yarn:factor=80")])
def test_cache_and_round_trip(family, method, tmp_path):
    model = model_of(family)
    with rope_patch.patched(model, method):
        assert_cached_equals_full(model)
    assert_round_trip(model, tmp_path, method)


@pytest.mark.parametrize("family", [*LAYOUTS, "deepseek_v2", "deepseek_v3", "deepseek_v3-halves", "minicpm3"])
@pytest.mark.parametrize(("method", "parameters"), [("yarn:factor=4", YARN), ("pi:factor=4", {"rope_type": "linear"})])
def test_the_effect_is_that_of_transformers_own_type(family, method, parameters):
    """Without mscale_all_dim the softmax scale does not depend on the type."""
    model = model_of(family, rope_parameters=PLAIN)
    before = logits(model)
    rope_patch.apply(model, method, target_length=256)
    scaled = {**PLAIN, "factor": 4.0, **parameters}
    assert torch.equal(logits(model), logits(model_of(family, rope_parameters=scaled)))
    assert not torch.allclose(logits(model), before, atol=1e-4)


def test_the_softmax_scale_is_kept_by_hand(tmp_path):
    """DeepSeek: (8 + 8)^-0.5 x (0.1 ln 40 + 1)^2, which transformers reads from factor and mscale_all_dim."""
    by_hand = 0.25 * (0.1 * math.log(40) + 1) ** 2
    model = model_of("deepseek_v3-yarn")
    rope_patch.apply(model, "p_rope:p=0.5")
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.rope_parameters["rope_type"] == "longrope"
    for each in (model, again):
        assert each.model.layers[0].self_attn.scaling == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize(
    ("family", "factor"), [("deepseek_v3", 80), ("deepseek_v3-yarn", 2), ("deepseek_v2", 80), ("minicpm3", 80)]
)
def test_a_yarn_that_states_mscale_moves_the_softmax_scale_as_transformers_does(family, factor, tmp_path):
    """In memory as in a model that transformers builds from the new config; restored after each way to undo it."""
    model = model_of(family)
    before = logits(model)
    scale = model.model.layers[0].self_attn.scaling
    rope_patch.apply(model, f"yarn:factor={factor}:mscale=1:mscale_all_dim=1")
    inside = logits(model)
    moved = model.model.layers[0].self_attn.scaling
    assert moved == pytest.approx(0.25 * (0.1 * math.log(80) + 1) ** 2, rel=1e-12) != scale
    rope_patch.save(model, tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(stock), inside)
    again = rope_patch.load(tmp_path)
    assert torch.equal(logits(again), inside)
    rope_patch.apply(model, "p_rope:p=0.5", replace=True)
    assert model.model.layers[0].self_attn.scaling == scale
    for each in (model, stock, again):
        rope_patch.restore(each)
        assert torch.equal(logits(each), before)


def test_what_attention_looks_up_while_it_runs_is_kept():
    """Ministral 3: a temperature that grows with the position over the original context; in what is exported, too."""
    model = model_of("ministral3")
    for method in METHODS:
        with rope_patch.patched(model, method) as patch:
            found = model.config.rope_parameters
            assert (found["llama_4_scaling_beta"], found["original_max_position_embeddings"]) == (0.1, 16)
            settings = config_keys(locate(model), [*patch.after.values()], everywhere=True)
            assert settings["rope_parameters"]["original_max_position_embeddings"] == 16


@pytest.mark.parametrize(
    ("attention", "cls", "family"),
    [
        (LlamaAttention, LlamaForCausalLM, "llama"),
        # Behind experts, which cannot be run without numbers.
        (MixtralAttention, MixtralForCausalLM, "mixtral"),
    ],
)
def test_a_class_that_reads_the_config_in_an_unknown_way_is_refused(attention, cls, family):
    class Reading(attention):
        def forward(self, *args, **kwargs):
            self.seen = list(self.config.rope_parameters)
            return super().forward(*args, **kwargs)

    class ReadingForCausalLM(cls):
        def __init__(self, config):
            super().__init__(config)
            self.model.layers[1].self_attn = Reading(config, 1)

    model = ReadingForCausalLM(tiny_config(family)).eval()
    before = logits(model)
    with pytest.raises(ValueError, match="Reading"):
        rope_patch.apply(model, "p_rope:p=0.5")
    assert torch.equal(logits(model), before)
    with rope_patch.patched(model, "default"):  # which changes no config
        assert torch.equal(logits(model), before)
