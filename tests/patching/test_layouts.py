"""Families that lay cos and sin out in ways of their own, and those with several position axes."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from support.patches import cos_sin, module_of
from support.round_trip import assert_cache_and_round_trip, assert_identity, assert_same_as_transformers, scaled_types
from support.tiny import SIZE, YARN, drawn_model, ids, logits
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    GptOssConfig,
    Llama4TextConfig,
    Qwen3_5TextConfig,
)
from transformers.models.glm4v.configuration_glm4v import Glm4vTextConfig
from transformers.models.glm4v.modeling_glm4v import Glm4vTextModel
from transformers.models.hunyuan_vl.configuration_hunyuan_vl import HunYuanVLTextConfig
from transformers.models.hunyuan_vl.modeling_hunyuan_vl import HunYuanVLTextModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

import rope_patch
from rope_patch.patching.rotary import RotaryLayout, layout_of

FOUR = {**SIZE, "num_hidden_layers": 4}
CONFIGS = {
    "cohere": CohereConfig(**SIZE),
    "cohere2": Cohere2Config(**SIZE, sliding_window=16, layer_types=["sliding_attention", "full_attention"]),
    "gpt_oss": GptOssConfig(
        **SIZE, head_dim=16, num_local_experts=2, num_experts_per_tok=1, sliding_window=16,
        rope_parameters={**YARN, "factor": 2.0, "truncate": False},
    ),
    "llama4": Llama4TextConfig(
        **FOUR, head_dim=16, num_local_experts=1, intermediate_size_mlp=32, no_rope_layers=[1, 0, 1, 0],
        attention_chunk_size=32,
    ),
    "qwen3_5": Qwen3_5TextConfig(**SIZE, head_dim=32, layer_types=["linear_attention", "full_attention"]),
}  # fmt: skip
LAYOUTS = {
    "cohere": RotaryLayout("neighbours"),
    "cohere2": RotaryLayout("neighbours"),
    "gpt_oss": RotaryLayout("once"),
    "llama4": RotaryLayout("complex"),
    "qwen3_5": RotaryLayout("halves", axes=3),
}
every_family = pytest.mark.parametrize("family", CONFIGS)

SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
AXES = {
    "qwen2_vl": (Qwen2VLTextConfig, Qwen2VLTextModel),
    "qwen2_5_vl": (Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel),
    "qwen3_vl": (Qwen3VLTextConfig, Qwen3VLTextModel),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5TextModel),
    "glm4v": (Glm4vTextConfig, Glm4vTextModel),
    # The two features of a pair lie on different axes here.
    "hunyuan_vl": (HunYuanVLTextConfig, HunYuanVLTextModel),
}
every_axes = pytest.mark.parametrize("family", AXES)
OTHERS = {"qwen3_5": {"layer_types": ["full_attention"] * 2}}


def model_of(family):
    return drawn_model(CONFIGS[family])


def text_model(family, **parameters):
    """The text decoder of a model with several position axes, its weights the same for every table."""
    config, cls = AXES[family]
    torch.manual_seed(0)
    return cls(config(**SIZE, head_dim=16, **OTHERS.get(family, {}), rope_parameters={**SECTIONS, **parameters})).eval()


def image_positions():
    """Positions (3, 2, 24) of a text with an image of 4 x 3 patches in it: its axes differ."""
    time, height, width = (torch.arange(24) for _ in range(3))
    patch = torch.arange(12)
    time[6:18], height[6:18], width[6:18] = 6, 6 + patch // 3, 6 + patch % 3
    for axis in (time, height, width):
        axis[18:] = torch.arange(10, 16)
    return torch.stack((time, height, width))[:, None].expand(3, 2, 24)


@torch.no_grad()
def hidden(model, positions=None):
    return model(input_ids=ids(24), position_ids=positions, use_cache=False).last_hidden_state


def equal(one, other):
    """Whether two rotary modules returned the same: cos and sin, or one complex tensor."""
    pairs = zip(*(item if isinstance(item, tuple) else (item,) for item in (one, other)), strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


# --- the layout -------------------------------------------------------------------------------------------------------


@every_family
def test_the_layout_is_found(family):
    model = model_of(family)
    original = module_of(model)
    assert layout_of(original, None, len(original.inv_freq)) == LAYOUTS[family]
    rope_patch.apply(model, "default")
    assert module_of(model).layout == LAYOUTS[family]


def test_cos_of_neighbours_by_hand():
    """Cohere at position 2 with inv_freq [1, 0.5]: the angles are 2, 2, 1, 1."""
    config = CohereConfig(**{**SIZE, "hidden_size": 16})
    model = AutoModelForCausalLM.from_config(config).eval()
    rope_patch.apply(model, "table", values=[1.0, 0.5])
    cos, sin = cos_sin(model, torch.tensor([[2]]))
    torch.testing.assert_close(cos[0, 0], torch.tensor([math.cos(2), math.cos(2), math.cos(1), math.cos(1)]))
    torch.testing.assert_close(sin[0, 0], torch.tensor([math.sin(2), math.sin(2), math.sin(1), math.sin(1)]))


def test_axes_by_hand():
    """Sections [1, 1, 2] at time 1, height 20, width 300, and inv_freq [1, 0.1, 0.01, 0.001].

    Qwen2-VL: pair 0 on time, 1 on height, 2 and 3 on width. Qwen3-VL takes turns: time, height, width, and then time.
    """
    positions = torch.tensor([1, 20, 300])[:, None, None]
    by_family = {"qwen2_vl": [1.0, 2.0, 3.0, 0.3], "qwen3_vl": [1.0, 2.0, 3.0, 0.001]}
    for family, angles in by_family.items():
        config, cls = AXES[family]
        size = {**SIZE, "hidden_size": 32, "head_dim": 8}
        model = cls(config(**size, rope_parameters={**SECTIONS, "mrope_section": [1, 1, 2]}))
        rope_patch.apply(model, "table", values=[1.0, 0.1, 0.01, 0.001])
        cos, sin = cos_sin(model, positions)
        torch.testing.assert_close(cos[0, 0], torch.tensor(angles * 2).cos())
        torch.testing.assert_close(sin[0, 0], torch.tensor(angles * 2).sin())


def test_a_forward_pass_that_computes_something_else_is_of_no_known_layout():
    original = copy.deepcopy(module_of(model_of("cohere")))
    cls = type(original)

    class Squared(cls):
        def forward(self, x, position_ids):
            return super().forward(x, position_ids**2)

    original.__class__ = Squared
    assert layout_of(original, None, 8) == RotaryLayout()  # whose numbers a check finds wrong
    model = model_of("cohere")
    model.model.rotary_emb = original
    with pytest.raises(ValueError, match="CohereForCausalLM"):
        rope_patch.apply(model, "yarn:factor=4")


# --- patches ----------------------------------------------------------------------------------------------------------


@every_family
@scaled_types
def test_the_effect_is_that_of_transformers_own_type(family, method, parameters):
    assert_same_as_transformers(CONFIGS[family], method, parameters)


@every_family
def test_identity(family):
    assert_identity(model_of(family))


@every_family
@pytest.mark.parametrize("method", ["yarn:factor=4", "p_rope:p=0.5", "truncated"])
def test_cache_and_round_trip(family, method, tmp_path):
    assert_cache_and_round_trip(model_of(family), tmp_path, method)


def test_layers_without_rotary_embeddings_are_left_alone():
    """Llama 4: given the same states, a layer that does not rotate returns the same, to the last bit."""
    model = model_of("llama4")
    states, places = torch.randn(1, 12, 64), torch.arange(12)[None]

    def outputs():
        turn = model.model.rotary_emb(states, places)
        with torch.no_grad():
            return [
                layer(states, attention_mask=None, position_ids=places, position_embeddings=turn)
                for layer in model.model.layers
            ]

    before = outputs()
    rope_patch.apply(model, "pi:factor=4")
    same = [torch.equal(one, other) for one, other in zip(before, outputs(), strict=True)]
    assert same == [not rotates for rotates in model.config.no_rope_layers] == [False, True, False, True]


@every_family
def test_the_table_survives(family):
    model = model_of(family)
    rope_patch.apply(model, "yarn:factor=4")
    places = torch.tensor([[0, 1, 500, 4000]])
    expected = module_of(model)(torch.zeros(1), places)

    def same(module):
        return equal(module(torch.zeros(1), places), expected)

    assert same(module_of(copy.deepcopy(model).to(torch.bfloat16).float()))
    assert same(pickle.loads(pickle.dumps(module_of(model))))
    assert same(module_of(copy.deepcopy(model).to("meta").to_empty(device="cpu")))
    model.init_weights()
    assert same(module_of(model)) and not dict(module_of(model).named_buffers())


@pytest.mark.slow
@every_family
def test_compiled_in_one_graph(family):
    model = model_of(family)
    rope_patch.apply(model, "yarn:factor=4")
    module, x, places = module_of(model), torch.zeros(1), torch.arange(7)[None]
    torch._dynamo.reset()
    assert equal(torch.compile(module, fullgraph=True, backend="eager")(x, places), module(x, places))


# --- several position axes --------------------------------------------------------------------------------------------


@every_axes
@pytest.mark.parametrize(("method", "kind"), [("yarn:factor=4", "yarn"), ("pi:factor=4", "linear")])
def test_scaled_tables_are_those_of_transformers_own_class_on_every_axis(family, method, kind):
    model = text_model(family)
    scaled = {"rope_type": kind, "factor": 4.0}
    if kind == "yarn":
        scaled["original_max_position_embeddings"] = 64
    expected = text_model(family, **scaled)
    rope_patch.apply(model, method, target_length=256)
    assert model.config.rope_parameters["mrope_section"] == [2, 3, 3]
    for positions in (None, image_positions()):
        assert torch.equal(hidden(model, positions), hidden(expected, positions))


@every_axes
def test_identity_is_exact_methods_keep_the_order_of_pairs_and_folders_reload(family, tmp_path):
    model = text_model(family)
    before = hidden(model, image_positions())
    assert not torch.allclose(hidden(model), before, atol=1e-5)
    with rope_patch.patched(model, "default"):
        assert module_of(model).layout.axes == 3
        assert torch.equal(hidden(model, image_positions()), before)
    for method in ("p_rope:p=0.5", "abf:rope_theta=500000", "truncated", "nope"):
        with rope_patch.patched(model, method) as patch:
            after = hidden(model, image_positions())
            assert not torch.allclose(after, before, atol=1e-5)
            rope_patch.verify(model)
            folder = tmp_path / patch.method.name
            model.save_pretrained(folder)
            assert torch.equal(hidden(type(model).from_pretrained(folder).eval(), image_positions()), after)
    assert torch.equal(hidden(model, image_positions()), before)


def test_a_whole_vision_model(tmp_path):
    """Qwen2-VL with its vision tower: the text decoder is patched, and the tower left alone."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    text = {**SIZE, "rope_parameters": SECTIONS}
    vision = {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64, "mlp_ratio": 2}
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision)).eval()
    tower, before = list(model.model.visual.modules()), logits(model)
    with rope_patch.patched(model, "yarn:factor=4", target_length=256):
        assert not torch.allclose(logits(model), before, atol=1e-5)
        assert list(model.model.visual.modules()) == tower
        rope_patch.save(model, tmp_path)
        assert torch.equal(logits(type(model).from_pretrained(tmp_path).eval()), logits(model))
    assert torch.equal(logits(model), before)
