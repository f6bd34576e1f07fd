"""Families that lay cos and sin out in ways of their own, and those with several position axes."""

import copy
import pickle

import pytest
import torch
from support.patches import cos_sin, module_of
from support.states import model_of
from support.tiny import LAYOUTS, ids, tiny_config, tiny_model
from transformers import AutoModel

import rope_patch
from rope_patch.patching.rotary import layout_of

# The two features of a pair of HunYuan lie on different axes.
AXES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "hunyuan_vl")
every_axes = pytest.mark.parametrize("family", AXES)


def text_model(family, sections=(2, 3, 3), head_dim=16, **parameters):
    """The text decoder of a model with several position axes, its weights the same for every table."""
    config = tiny_config(
        f"{family}_text",
        hidden_size=4 * head_dim,
        layer_types=["full_attention"] * 2,
        head_dim=head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*sections], **parameters},
    )
    torch.manual_seed(0)
    return AutoModel.from_config(config).eval()


def image_positions():
    """Positions (3, 2, 24) of a text with an image of 4 x 3 patches in it: its axes differ."""
    time, height, width = (torch.arange(24) for _ in range(3))
    patch = torch.arange(12)
    time[6:18] = 6
    height[6:18] = 6 + patch // 3
    width[6:18] = 6 + patch % 3
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


def test_cos_of_neighbours_by_hand():
    """Cohere at position 2 with inv_freq [1, 0.5]: the angles are 2, 2, 1, 1."""
    model = tiny_model("cohere", hidden_size=16)
    rope_patch.apply(model, "table", values=[1.0, 0.5])
    cos, sin = cos_sin(model, torch.tensor([[2]]))
    angles = torch.tensor([2.0, 2.0, 1.0, 1.0])
    torch.testing.assert_close(cos[0, 0], angles.cos())
    torch.testing.assert_close(sin[0, 0], angles.sin())


def test_axes_by_hand():
    """Sections [1, 1, 2] at time 1, height 20, width 300, and inv_freq [1, 0.1, 0.01, 0.001].

    Qwen2-VL: pair 0 on time, 1 on height, 2 and 3 on width. Qwen3-VL takes turns: time, height, width, and then time.
    """
    positions = torch.tensor([1, 20, 300])[:, None, None]
    by_family = {"qwen2_vl": [1.0, 2.0, 3.0, 0.3], "qwen3_vl": [1.0, 2.0, 3.0, 0.001]}
    for family, angles in by_family.items():
        model = text_model(family, sections=(1, 1, 2), head_dim=8)
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
    assert layout_of(original, None, 8) is None
    model = model_of("cohere")
    model.model.rotary_emb = original
    with pytest.raises(ValueError, match="CohereForCausalLM"):
        rope_patch.apply(model, "yarn:factor=4")


# --- patches ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", LAYOUTS)
def test_pickled_and_compiled_in_one_graph_it_computes_the_same(family):
    model = model_of(family)
    rope_patch.apply(model, "yarn:factor=4")
    module = module_of(model)
    x = torch.zeros(1)
    places = torch.tensor([[0, 1, 500, 4000]])
    assert equal(pickle.loads(pickle.dumps(module))(x, places), module(x, places))
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
@pytest.mark.parametrize("method", ["p_rope:p=0.5", "truncated"])
def test_tables_of_several_axes_reload(family, method, tmp_path):
    model = text_model(family)
    before = hidden(model, image_positions())
    assert not torch.allclose(hidden(model), before, atol=1e-5)
    rope_patch.apply(model, method)
    after = hidden(model, image_positions())
    assert not torch.allclose(after, before, atol=1e-5)
    model.save_pretrained(tmp_path)
    assert torch.equal(hidden(type(model).from_pretrained(tmp_path), image_positions()), after)


@pytest.mark.parametrize("method", ["yarn:factor=4", "p_rope:p=0.5"])
def test_a_family_that_computes_its_table_anew_in_each_pass_uses_ours(method):
    model = tiny_model("phimoe", num_local_experts=2)
    rope_patch.apply(model, method)
    rope_patch.verify(model)  # by what the module returns
