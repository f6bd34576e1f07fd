"""Bounds on outliers: hand-derived values, brute force, and planted models."""

from __future__ import annotations

import math

import pytest
import torch
from support.states import model_of, text
from support.tiny import LLAMA3, ids, tiny_model
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import rope_patch
from rope_patch import frequencies
from rope_patch.analysis.outliers import bounds, phi, scatter
from rope_patch.modeling.capture import capture

LAYERS, HEADS, GROUPS, PAIRS, CONTEXT = 3, 4, 2, 16, 256
TAU = 2 * math.pi


def planted(key_angle, query_angle, key_radius, query_radius):
    """A Llama whose queries and keys are the same for every token: (layers, heads, pairs) angles and radii."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS // GROUPS,
            head_dim=2 * PAIRS,
            max_position_embeddings=CONTEXT,
            attention_bias=True,
        )
    ).eval()
    for index, layer in enumerate(model.model.layers):
        for projection, angle, radius in (("k_proj", key_angle, key_radius), ("q_proj", query_angle, query_radius)):
            linear = getattr(layer.self_attn, projection)
            a, r = angle[index], radius[index]
            with torch.no_grad():
                linear.weight.zero_()
                linear.bias.copy_(torch.cat((r * a.cos(), r * a.sin()), dim=-1).flatten())
    return model


def draw(seed=0):
    """Angles at least 0.02 rad from what decides, radii 1 to 15."""
    generator = torch.Generator().manual_seed(seed)

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


@pytest.mark.parametrize(
    ("rotary_dim", "context", "partial", "share", "mean"),
    [(32, 2048, range(11, 16), 0.31, 3.93), (128, 4096, range(46, 64), 0.28, 4.19)],
    ids=["Phi-1", "Llama-2-7B"],
)
def test_golden_bounds(rotary_dim, context, partial, share, mean):
    got = bounds(frequencies.geometric(1e4, rotary_dim), context)
    assert got.partial.nonzero().flatten().tolist() == list(partial)
    mean_angle = float(got.angle[got.partial].mean())
    assert (round(float(got.partial.double().mean()), 2), round(mean_angle, 2)) == (share, mean)
    assert got.limit == pytest.approx(TAU / context)
    # By hand: the slowest pair of Phi-1 turns 1e4^(-30/32) = 1.778e-4 rad/token, of Llama-2 1e4^(-126/128) = 1.155e-4.
    slowest = {32: math.pi + 2048 * 1.778279e-4 / 2, 128: math.pi + 4096 * 1.154782e-4 / 2}[rotary_dim]
    assert float(got.angle[-1]) == pytest.approx(slowest, rel=1e-5)


@pytest.mark.parametrize("context", [64, 300])
def test_bounds_are_those_of_a_scan(context):
    """Pair by pair: an angle a little above the bound is an offset feature, one a little below is not."""
    table = frequencies.geometric(1e4, 32)
    got = bounds(table, context)
    for f, partial, limit in zip(table.double().tolist(), got.partial.tolist(), got.angle.tolist(), strict=True):
        assert partial == (limit < TAU)
        for angle in (0.01, 1.0, math.pi - 0.01, 3.5, 4.5, 5.5, TAU - 1e-3, limit + 0.01, limit - 0.01):
            if angle <= TAU:
                assert is_offset(angle, f, context) == (angle > limit), (f, angle)


def test_an_unrotated_pair_lies_below_the_frequency_bound_and_is_never_an_offset_feature():
    got = bounds(torch.tensor([1.0, 0.01, 0.0]), 256)
    assert got.partial.tolist() == [False, True, True]
    assert got.angle.tolist() == pytest.approx([math.pi + 128, math.pi + 1.28, math.inf])
    assert not any(is_offset(angle, 0.0, 256) for angle in (0.5, 2.0, 4.0, 6.0))
    for context in (0, -1):
        with pytest.raises(ValueError, match="context"):
            bounds(torch.tensor([1.0]), context)


def test_bounds_are_of_the_table_and_the_window_in_use():
    model = tiny_model("llama", rope_parameters=LLAMA3, max_position_embeddings=512)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config)
    got = scatter(capture(model, ids(20, 1)))
    assert torch.equal(got.partial[:8], expected.double() < TAU / 512)
    torch.testing.assert_close(got.angle[:8], math.pi + 256 * expected.double())
    assert not torch.equal(frequencies.geometric(1e4, 16) < TAU / 512, got.partial[:8]), "the plain table has others"
    model = model_of("llama")
    with rope_patch.patched(model, "p_rope", p=0.5):
        got = scatter(capture(model, text()))
    assert got.partial[:8].tolist() == [False] * 3 + [True] * 5  # 2π/64 = 0.098: pair 2 turns 0.1 rad/token
    assert got.angle[:8].isinf().tolist() == [False] * 4 + [True] * 4
    sliding = scatter(capture(model_of("gemma2"), text()))
    # The window of 16 tokens: 2π/16 = 0.39 passes pair 1 (0.316) too; the full layer of 64 does not.
    assert sliding.partial[sliding.layer == 0][:8].tolist() == [False] + [True] * 7
    assert sliding.partial[sliding.layer == 1][:8].tolist() == [False] * 3 + [True] * 5


# --- a planted checkpoint


@pytest.mark.parametrize("chunk", [None, 11])
def test_a_planted_checkpoint_agrees_with_a_brute_force_scan(chunk):
    drawn_phi, arrays = draw()
    got = capture(planted(*arrays), ids(30, 1), chunk=chunk)
    points = scatter(got)
    table = frequencies.geometric(1e4, 2 * PAIRS).double()
    shape = (LAYERS, HEADS, PAIRS)
    torch.testing.assert_close(points.phi.view(shape), drawn_phi, rtol=0, atol=1e-5)
    keys = arrays[2].repeat_interleave(GROUPS, 1)
    torch.testing.assert_close(points.key_radius.view(shape), keys, rtol=1e-5, atol=0)
    torch.testing.assert_close(points.query_radius.view(shape), arrays[3], rtol=1e-5, atol=0)
    assert points.layer.view(shape)[2, 0, 0] == 2 and points.head.view(shape)[0, 3, 0] == 3
    assert points.pair.view(shape)[0, 0].tolist() == list(range(PAIRS))
    assert float(points.key_deviation.max()) < 1e-3, "nothing varies, so nothing deviates"

    angles = drawn_phi.flatten().tolist()
    scanned = torch.tensor([is_offset(a, f, CONTEXT) for a, f in zip(angles, points.inv_freq.tolist(), strict=True)])
    assert torch.equal(points.within_angle, scanned)
    assert 10 < int(scanned.sum()) < len(scanned) - 10, "some satisfy the definition, some do not"
    never_turns = (CONTEXT * table < TAU).expand(shape).flatten()
    assert torch.equal(points.partial, never_turns)


def test_pairs_that_do_not_rotate_lie_below_the_frequency_bound_alone():
    _, arrays = draw()
    model = planted(*arrays)
    with rope_patch.patched(model, "p_rope", p=0.5):
        got = capture(model, ids(8, 1))
    points = scatter(got)
    assert not points.within_angle[points.pair >= 8].any() and bool(points.partial[points.pair >= 8].all())


def test_bad_states():
    got = capture(tiny_model(), ids(8, 1))
    with pytest.raises(ValueError, match="value"):
        scatter(got).radius("value")


def test_angles_by_hand():
    q, k = torch.tensor([[[1.0, 0.0]]]).double(), torch.tensor([[[math.cos(1), math.sin(1)]]]).double() * 2
    assert float(phi(q, k)) == pytest.approx(1)
    assert float(phi(k, q)) == pytest.approx(TAU - 1)
    assert float(phi(q, q)) == pytest.approx(TAU)
