"""Bounds, recall, decomposition and sinks: hand-derived values, brute force, and models that really attend."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
from support.states import model_of, stored, text
from support.tiny import LLAMA3, ids, tiny_model
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import rope_patch
from rope_patch import frequencies
from rope_patch.analysis.decomposition import contributions, decompose, phi
from rope_patch.analysis.outliers import bounds, scatter
from rope_patch.analysis.recall import RELAXED, recall
from rope_patch.analysis.sinks import sinks
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
    for edge in (math.pi + 0 * limit, limit, limit - RELAXED):
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

    (*_, row) = recall(got, quantiles=(0.9,)).rows  # of the queries
    radius = arrays[3].flatten()
    assert row.threshold == pytest.approx(float(radius.quantile(0.9)), rel=1e-5)
    big = radius > row.threshold * (1 + 1e-6)
    limit = math.pi + CONTEXT * points.inv_freq / 2 - RELAXED
    shares = [float(share[big].double().mean()) for share in (never_turns, scanned, drawn_phi.flatten() > limit)]
    assert (row.features, row.outliers, row.unrotated) == (len(radius), int(big.sum()), 0)
    assert (row.frequency, row.angle, row.relaxed) == pytest.approx(shares)


def test_recall_by_hand():
    """Four outliers: below both bounds, below the first alone, 0.05 rad short of the second, and a fast pair."""
    shape, half = (LAYERS, HEADS, PAIRS), (LAYERS, HEADS // GROUPS, PAIRS)
    key_angle, query_angle = torch.zeros(half), torch.full(shape, -1.0)
    key_radius, query_radius = torch.ones(half), torch.ones(shape)
    # Pair 12 turns 1e-3 rad/token, so 0.256 rad in 256 tokens: its bound is π + 0.128 = 3.2696.
    for layer, pair, angle in ((0, 12, 3.5), (1, 12, 1.0), (2, 12, 3.2196), (0, 0, 3.5)):
        key_radius[layer, 0, pair] = 10.0
        query_angle[layer, :2, pair] = -angle
    got = capture(planted(key_angle, query_angle, key_radius, query_radius), ids(8, 1))
    key, query = recall(got, thresholds=[9.0]).rows
    # Each key head serves two query heads: 8 outliers.
    assert (key.outliers, key.frequency, key.angle, key.relaxed) == (8, 0.75, 0.25, 0.5)
    assert (query.outliers, query.frequency, query.angle, query.relaxed) == (0, None, None, None)
    assert json.loads(recall(got, thresholds=[9.0]).to_json())["rows"][0]["outliers"] == 8
    (one, _) = recall(got, thresholds=[9.0], layers=[1]).rows
    assert (one.outliers, one.frequency, one.angle) == (2, 1.0, 0.0)
    (wide, _) = recall(got, thresholds=[9.0], context=8).rows
    # 8 tokens: pair 12 must exceed π + 0.004, so 3.2196 does; pair 0 turns 1.27 times still.
    assert (wide.frequency, wide.angle) == (0.75, 0.5)


def test_outliers_that_do_not_rotate_are_counted():
    _, arrays = draw()
    model = planted(*arrays)
    with rope_patch.patched(model, "p_rope", p=0.5):
        got = capture(model, ids(8, 1))
    row = recall(got, thresholds=[6.0]).rows[0]
    keys = arrays[2].repeat_interleave(GROUPS, 1)
    assert row.unrotated == int((keys[..., 8:] > 6).sum()) > 0
    points = scatter(got)
    assert not points.within_angle[points.pair >= 8].any() and bool(points.partial[points.pair >= 8].all())


def test_bad_thresholds_and_layers():
    got = capture(tiny_model(), ids(8, 1))
    for options, message in (
        ({"thresholds": [-1]}, "thresholds"),
        ({"thresholds": [math.nan]}, "thresholds"),
        ({"quantiles": [1]}, "quantiles"),
    ):
        with pytest.raises(ValueError, match=message):
            recall(got, **options)
    for reading in (scatter, recall):
        with pytest.raises(ValueError, match="layers"):
            reading(got, layers=[7])
    with pytest.raises(ValueError, match="value"):
        scatter(got).radius("value")


# --- decomposition


def test_decomposition_by_hand():
    # Jonasson: with one pair turning 1 rad/token, an angle of 1 rad selects the previous token.
    q, k = torch.tensor([[[1.0, 0.0]]]).double(), torch.tensor([[[math.cos(1), math.sin(1)]]]).double() * 2
    got = contributions(q, k, torch.ones(1), torch.arange(4))
    assert got[0, 0].tolist() == pytest.approx([2 * math.cos(1 - p) for p in range(4)])
    assert int(got[0, 0].argmax()) == 1
    assert float(phi(q, k)) == pytest.approx(1)
    assert float(phi(k, q)) == pytest.approx(TAU - 1)
    assert float(phi(q, q)) == pytest.approx(TAU)


SETTINGS = {
    "llama-yarn": ("llama", {"attention_bias": True}, "yarn:factor=4"),
    "llama-p_rope": ("llama", {"attention_bias": True}, "p_rope:p=0.5"),
    "gemma2": ("gemma2", {"attention_bias": True, "attn_logit_softcapping": 2.0}, None),
    "gemma4": ("gemma4", {"attention_bias": True}, None),
    "phi": ("phi", {}, None),
    "glm": ("glm", {}, None),
    "gpt_neox": ("gpt_neox", {}, None),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_decomposition_is_what_a_model_of_constant_states_attends_to(name):
    """Zero weights leave the biases alone: the mean query and key are every query and key, and attention is D."""
    family, changes, method = SETTINGS[name]
    model = model_of(family, **changes)
    generator = torch.Generator().manual_seed(0)
    for layer in model.get_decoder().layers:
        attention = getattr(layer, "self_attn", None) or layer.attention
        for part in ("q_proj", "k_proj", "query_key_value"):
            linear = getattr(attention, part, None)
            if linear is not None:
                with torch.no_grad():
                    linear.weight.zero_()
                    linear.bias.copy_(1.2 * torch.randn(linear.bias.shape, generator=generator))
    if method is not None:
        rope_patch.apply(model, rope_patch.parse(method))
    row = text(30)
    got = capture(model, row)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(row[None], use_cache=False, output_attentions=True).attentions
    for layer in got.layers:
        decomposed = decompose(layer)
        assert decomposed.distances.tolist() == list(range(layer.context + 1))
        pattern = decomposed.pattern(range(30))
        torch.testing.assert_close(pattern.float(), weights[layer.index][0], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(pattern[0, 29], pattern[0, 29].mean(), atol=1e-3), "far from uniform"
        if name in ("phi", "gpt_neox", "glm"):  # half or all but a quarter of a head does not rotate
            assert decomposed.constant.abs().min() > 1e-3


def test_a_pattern_needs_its_distances():
    decomposed = decompose(capture(tiny_model(), ids(8, 1)).layers[0], torch.tensor([0, 1, 2, 4]))
    assert decomposed.pattern([0, 2]).sum(-1) == pytest.approx(torch.ones(4, 2))
    for query in (3, 4, -1):
        with pytest.raises(ValueError, match=f"position {query}"):
            decomposed.pattern([query])


# --- sinks


@pytest.mark.parametrize(
    ("name", "chunk"), [("glm", None), ("phi3-partial", 9), ("gemma4-shared", None), ("llama-yarn", 9)]
)
def test_sink_logits_equal_those_of_rotated_states(name, chunk, monkeypatch):
    """Against the family's own rotation of the stored mean query to every distance, the stored keys staying at 0."""
    model, row = model_of(name), text(30)
    with stored(model, monkeypatch) as states, torch.no_grad():
        model(row[None], use_cache=False)
    got = capture(model, row)
    modeling = sys.modules[type(model.get_decoder().layers[0]).__module__]
    for layer, sink in zip(got.layers, sinks(model, row, got, top=5, chunk=chunk), strict=True):
        keys = states["key"][layer.keys_of].repeat_interleave(layer.groups, 1)
        query = states["query"][layer.index].mean(0, keepdim=True)
        kinds = () if layer.layer_type is None else (layer.layer_type,)

        def rotated(x, positions, kinds=kinds):
            """States (tokens, heads, head_dim) at positions: (heads, tokens, head_dim), cos and sin scaled."""
            cos, sin = model.get_decoder().rotary_emb(torch.zeros(1), positions[None], *kinds)
            heads = x.transpose(0, 1)[None]
            if "gemma4" in name:
                return modeling.apply_rotary_pos_emb(heads, cos, sin)[0]
            return modeling.apply_rotary_pos_emb(heads, heads, cos, sin)[0][0]

        queries = rotated(query.expand(layer.context, -1, -1), torch.arange(layer.context))
        at_zero = rotated(keys, torch.zeros(30, dtype=torch.long))
        logits = torch.einsum("hpd,htd->hpt", queries, at_zero).mean(1) * layer.scaling
        best = logits.sort(descending=True)
        torch.testing.assert_close(sink.logit.float(), best.values[:, :5], rtol=1e-4, atol=1e-4)
        assert torch.equal(sink.position, best.indices[:, :5])
        assert torch.equal(sink.token, row[sink.position])
        score = (best.values - logits.mean(1, keepdim=True)) / logits.std(1, correction=0, keepdim=True)
        torch.testing.assert_close(sink.score.float(), score[:, :5], rtol=1e-3, atol=1e-3)
        for head in range(4):
            own = keys[sink.position[head], head]
            torch.testing.assert_close(sink.key[head].float(), own)
            mean = query[0, head]
            expected = torch.nn.functional.cosine_similarity(own, mean[None], dim=-1)
            torch.testing.assert_close(sink.cosine[head].float(), expected, rtol=1e-4, atol=1e-4)
            n = layer.key.pairs
            first, second = (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if name == "glm" else (slice(n), slice(n, 2 * n))
            turned = [torch.stack((states[:, first], states[:, second]), -1) for states in (own, mean[None])]
            pair = torch.nn.functional.cosine_similarity(*turned, dim=-1)
            torch.testing.assert_close(sink.alignment[head].float(), pair, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(sink.key_pairs[head, :, :, 0].float(), own[:, first])


def test_sinks_of_several_rows_and_bad_input():
    model, rows = model_of("llama"), text(60).view(2, 30)
    got = capture(model, rows)
    (result,) = sinks(model, rows, got, layers=[1], top=60)
    places = sorted(zip(result.row[2].tolist(), result.position[2].tolist(), strict=True))
    assert result.layer == 1 and places == [(row, position) for row in range(2) for position in range(30)]
    assert torch.equal(result.token, rows[result.row, result.position])
    assert result.score.mean(1).tolist() == pytest.approx([0] * 4, abs=1e-9)
    assert result.score.square().mean(1).tolist() == pytest.approx([1] * 4)
    with pytest.raises(ValueError, match="top"):
        sinks(model, rows, got, top=0)
    for other in (rows.view(1, 60), rows.flip(0)):
        with pytest.raises(ValueError, match="another text"):
            sinks(model, other, got)
    with rope_patch.patched(model, "pi", factor=2), pytest.raises(ValueError, match="layer 0"):
        sinks(model, rows, got)
    with pytest.raises(ValueError, match="shape"):
        sinks(model_of("llama", num_key_value_heads=1), rows, got)


def test_no_key_stands_out_by_rounding_alone():
    model, rows = planted(*draw()[1]), text(60).view(2, 30)
    keys = model.model.layers[0].self_attn.k_proj
    keys.register_forward_hook(lambda module, args, output: output * (1 + 2e-7 * torch.rand_like(output)))
    (same,) = sinks(model, rows, capture(model, rows, layers=[0]))
    assert same.score.abs().max() == 0
