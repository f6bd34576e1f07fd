"""Bounds on outliers: hand-derived values, brute force, and planted models."""

import itertools
import math

import pytest
import torch
from support.states import model_of, text
from support.tiny import LLAMA3, YARN, ids, tiny_model
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import rope_patch
from rope_patch import frequencies
from rope_patch.analysis.outliers import (
    bias_sentences,
    bounds,
    contributions,
    key_biases,
    mean_pairs,
    outlier_pairs,
    outlier_sentence,
)
from rope_patch.modeling.attention_layers import find_attention_layers
from rope_patch.modeling.capture import capture

LAYERS = 3
HEADS = 4
GROUPS = 2
PAIRS = 16
CONTEXT = 256
TAU = 2 * math.pi


def planted(key_angle, query_angle, key_radius, query_radius):
    """A Llama whose queries and keys are the same for every token: (layers, heads, pairs) angles and radii."""
    model = tiny_model(
        hidden_size=32,
        num_hidden_layers=LAYERS,
        head_dim=2 * PAIRS,
        max_position_embeddings=CONTEXT,
        attention_bias=True,
    )
    for index, layer in enumerate(model.model.layers):
        for projection, angle, radius in (("k_proj", key_angle, key_radius), ("q_proj", query_angle, query_radius)):
            linear = getattr(layer.self_attn, projection)
            a = angle[index]
            r = radius[index]
            with torch.no_grad():
                linear.weight.zero_()
                linear.bias.copy_(torch.cat((r * a.cos(), r * a.sin()), dim=-1).flatten())
    return model


def draw():
    """Angles at least 0.02 rad from what decides, radii 1 to 15."""
    generator = torch.Generator().manual_seed(0)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    key_angle = uniform(LAYERS, HEADS // GROUPS, PAIRS) * TAU
    drawn_phi = 0.02 + uniform(LAYERS, HEADS, PAIRS) * (TAU - 0.04)
    limit = math.pi + CONTEXT * frequencies.geometric(1e4, 2 * PAIRS).double() / 2
    for edge in (math.pi + 0 * limit, limit):
        drawn_phi = torch.where((drawn_phi - edge).abs() < 0.02, edge + 0.02, drawn_phi)
    query_angle = key_angle.repeat_interleave(GROUPS, 1) - drawn_phi
    key_radius = 1 + 14 * uniform(LAYERS, HEADS // GROUPS, PAIRS)
    return drawn_phi, (key_angle, query_angle, key_radius, 1 + 14 * uniform(LAYERS, HEADS, PAIRS))


def is_offset(angle, f, context):
    """Definition 3.1 by scanning ``d(p) < d(0)`` over real p, the ends of whole turns included."""
    p = torch.linspace(0, context, 20001, dtype=torch.float64)[1:]
    if f > 0:
        turns = torch.arange(1, int(context * f / TAU) + 1) * TAU / f
        p = torch.cat((p, turns[turns <= context]))
    return bool((torch.cos(angle - f * p) < math.cos(angle) - 1e-12).all())


# --- bounds


@pytest.mark.parametrize("context", [64, 300])
def test_bounds_are_those_of_a_scan(context):
    """Pair by pair: an angle a little above the bound is an offset feature, one a little below is not."""
    table = frequencies.geometric(1e4, 32)
    below, angles = bounds(table, context)
    for f, partial, limit in zip(table.double().tolist(), below.tolist(), angles.tolist(), strict=True):
        assert partial == (limit < TAU)
        for angle in (0.01, 1.0, math.pi - 0.01, 3.5, 4.5, 5.5, TAU - 1e-3, limit + 0.01, limit - 0.01):
            if angle <= TAU:
                assert is_offset(angle, f, context) == (angle > limit), (f, angle)


def test_an_unrotated_pair_lies_below_the_frequency_bound_and_is_never_an_offset_feature():
    below, angle = bounds(torch.tensor([1.0, 0.01, 0.0]), 256)
    assert below.tolist() == [False, True, True]
    assert angle.tolist() == pytest.approx([math.pi + 128, math.pi + 1.28, math.nan], nan_ok=True)
    assert not any(is_offset(angle, 0.0, 256) for angle in (0.5, 2.0, 4.0, 6.0))
    for context in (0, -1):
        with pytest.raises(ValueError, match="context"):
            bounds(torch.tensor([1.0]), context)


SCALED = {
    # DeepSeek-V2-Lite: arXiv:2503.01832 has 9 of its 32 pairs and a mean angle of 4.26.
    "DeepSeek": ({**YARN, "factor": 40.0, "original_max_position_embeddings": 4096}, 64, 163840, 163840, 9, 4.26),
    # Llama 3.1: its factor 8 over 8192 tokens would be 65,536, and it was trained with what it states.
    "llama3": ({**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 8192}, 128, 131072, 131072, 25, 3.733),
    # The cards of Qwen2.5 add YaRN and leave the context at what it was before the scaling.
    "yarn": ({**YARN, "rope_theta": 1e6, "original_max_position_embeddings": 32768}, 128, 32768, 131072, 24, 3.763),
}


@pytest.mark.parametrize("name", SCALED)
def test_bounds_of_a_scaled_table_are_not_taken_against_the_context_before_the_scaling(name):
    parameters, head_dim, stated, reach, count, mean = SCALED[name]
    model = tiny_model(head_dim=head_dim, max_position_embeddings=stated, rope_parameters=parameters)
    layer = capture(model, ids(8)).layers[0]
    below, angle = bounds(layer.inv_freq, layer.context)
    table, _ = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](model.config)
    slow = [f for f in table.tolist() if f < TAU / reach]
    assert layer.context == reach and int(below.sum()) == len(slow) == count
    by_hand = sum(math.pi + reach * f / 2 for f in slow) / count
    assert float(angle[below].mean()) == pytest.approx(by_hand, rel=1e-6) == pytest.approx(mean, abs=5e-3)


def every_pair(capture, states="key"):
    """Every pair of every head, by layer, head and pair."""
    return {(pair.layer, pair.head, pair.pair): pair for pair in mean_pairs(capture, states)}


def first_head(capture, layer=0):
    return [pair for (index, head, _), pair in sorted(every_pair(capture).items()) if (index, head) == (layer, 0)]


BELOW = ("offset feature", "partial turn", "unrotated")


def test_bounds_are_of_the_table_and_the_window_in_use():
    model = model_of("llama")
    with rope_patch.patched(model, "p_rope", p=0.5):
        got = first_head(capture(model, text()))
    # 2π/64 = 0.098: pair 2 turns 0.1 rad/token
    assert [pair.kind in BELOW for pair in got] == [False] * 3 + [True] * 5
    assert [pair.kind == "unrotated" for pair in got] == [False] * 4 + [True] * 4
    assert [math.isnan(pair.angle) for pair in got] == [False] * 4 + [True] * 4
    sliding = capture(model_of("gemma2"), text())
    # The window of 16 tokens: 2π/16 = 0.39 passes pair 1 (0.316) too; the full layer of 64 does not.
    assert [pair.kind in BELOW for pair in first_head(sliding)] == [False] + [True] * 7
    assert [pair.kind in BELOW for pair in first_head(sliding, 1)] == [False] * 3 + [True] * 5


# --- a planted checkpoint


def test_a_planted_checkpoint_agrees_with_a_brute_force_scan():
    drawn_phi, arrays = draw()
    got = capture(planted(*arrays), ids(30, 1))
    keys = every_pair(got)
    queries = every_pair(got, "query")
    table = frequencies.geometric(1e4, 2 * PAIRS).double().tolist()
    offsets = 0
    for layer, head, pair in itertools.product(range(LAYERS), range(HEADS), range(PAIRS)):
        key = keys[layer, head, pair]
        f = table[pair]
        angle = float(drawn_phi[layer, head, pair])
        assert key.phi == pytest.approx(angle, abs=1e-5)
        assert key.radius == pytest.approx(float(arrays[2][layer, head // GROUPS, pair]), rel=1e-5)
        assert queries[layer, head, pair].radius == pytest.approx(float(arrays[3][layer, head, pair]), rel=1e-5)
        assert key.deviation < 1e-3, "nothing varies, so nothing deviates"
        assert (key.wavelength, key.turns) == pytest.approx((TAU / f, CONTEXT * f / TAU))
        is_below = CONTEXT * f < TAU
        is_one = is_offset(angle, f, CONTEXT)
        assert key.kind == ("offset feature" if is_one else "partial turn" if is_below else "full turns")
        offsets += is_one
    assert 10 < offsets < len(keys) - 10, "some satisfy the definition, some do not"


@pytest.mark.parametrize("name", ["llama-yarn", "phi", "glm"])
def test_contributions_are_products_of_rotated_means(name):
    """d(p) by rotating mean query and mean key to two positions, features one by one, and D(p) as their whole logit."""
    layer = capture(model_of(name), text()).layers[1]
    n = len(layer.inv_freq)
    scale = layer.attention_scaling**2 * layer.scaling
    query = layer.query.mean[3]
    key = layer.key.mean[3 // layer.groups]
    for distance in (0, 1, 30):
        turned = []
        for i, f in enumerate(layer.inv_freq.tolist()):
            a, b = (2 * i, 2 * i + 1) if layer.query.interleaved else (i, i + n)
            place = 5
            q = complex(query[a], query[b])
            k = complex(key[a], key[b])
            q *= complex(math.cos(f * (place + distance)), math.sin(f * (place + distance)))
            k *= complex(math.cos(f * place), math.sin(f * place))
            turned.append((q.real * k.real + q.imag * k.imag) * scale)
        got = contributions(layer, 3, torch.tensor([distance]))[:, 0]
        assert got.tolist() == pytest.approx(turned, rel=1e-5, abs=1e-7)


def test_outliers_are_above_a_multiple_of_the_median_of_all_layers(monkeypatch):
    monkeypatch.setattr(rope_patch.analysis.outliers, "OUTLIER_RATIO", 1.5)
    _, arrays = draw()
    got = capture(planted(*arrays), ids(8, 1))
    radius = arrays[2].repeat_interleave(GROUPS, 1).flatten()
    outliers = outlier_pairs(got)
    assert len(outliers) == int((radius > 1.5 * radius.median()).sum())
    assert [pair.radius for pair in outliers] == sorted((pair.radius for pair in outliers), reverse=True)
    assert outliers[0].ratio == pytest.approx(float(radius.max() / radius.median()), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "module", "row", "features"),
    [
        ("qwen2", "k_proj", 16, (1, 9)),  # pair 1 of key head 1: features 1 and 1 + 8
        ("glm", "k_proj", 16, (2, 3)),  # the same pair of a model whose pairs are neighbours
        (
            "gpt_neox",
            "query_key_value",
            4 * 16,
            (1, 3),
        ),  # queries, keys and values of a head follow each other, and two pairs rotate
    ],
)
def test_a_long_bias_is_named_before_a_text_is_read(name, module, row, features):
    model = model_of(name)
    layer = find_attention_layers(model)[1]
    assert key_biases(model) == () == tuple(bias_sentences(()))
    with torch.no_grad():
        for feature, size in zip(features, (300.0, -400.0), strict=True):
            layer.parts["key"].module.bias[row + feature] = size
    (bias,) = key_biases(model)
    assert (bias.module, bias.layer, bias.head, bias.pair, bias.radius) == (module, 1, 1, 1, 500.0)
    median = torch.cat([layer.key.radius.flatten() for layer in capture(model, ids(64, 1)).layers]).median()
    assert bias.ratio == pytest.approx(500 / float(median), rel=0.3)
    (sentence,) = bias_sentences([bias])
    assert sentence.startswith(f"{module} of layer 1 has a bias of 500 in pair 1, {bias.ratio:.0f} times")


def test_a_key_head_is_counted_once():
    _, arrays = draw()
    radius = arrays[2].clone()
    radius[1, 0, 5] = radius[2, 1, 15] = 100.0
    got = capture(planted(*arrays[:2], radius, arrays[3]), ids(30, 1))
    assert len(outlier_pairs(got)) == 2 * GROUPS
    sentence = outlier_sentence(got, mean_pairs(got), "key")
    # Pair 5 turns 0.056 rad a token, 2.3 times in 256 tokens, and pair 15 less than once.
    assert sentence.startswith(
        f"2 of {LAYERS * HEADS // GROUPS * PAIRS} mean key pairs are outliers, over 5 and up to "
    )
    assert "50 % make no full turn within the context (of all pairs 56 %)" in sentence


def test_bad_states():
    got = capture(tiny_model(), ids(8, 1))
    with pytest.raises(ValueError, match="value"):
        mean_pairs(got, "value")
