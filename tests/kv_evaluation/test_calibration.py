"""Scales of an fp8 cache that a text gives, and what they change."""

import pytest
import torch
from support.prompting import ENGLISH, TOKENIZER
from support.tiny import ids, small
from transformers import DynamicCache

import rope_patch
from rope_patch.evaluation.suite import EvalSuite
from rope_patch.kv_cache.cache import quantized
from rope_patch.kv_cache.plans import plan_layers
from rope_patch.kv_cache.schemes import Scheme
from rope_patch.kv_evaluation.calibration import calibrated
from rope_patch.modeling.attention_layers import find_attention_layers
from rope_patch.options.evaluation import EvalSpec


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma4-shared"])
@torch.no_grad()
def test_the_largest_key_and_value_that_a_plain_cache_ever_holds_become_448(family):
    model = small(family)
    rows = ids(24, 2)
    largest = {}
    for row in rows:
        cache = DynamicCache(config=model.config)
        for token in row:  # one by one, since a sliding layer keeps only its window
            model(token[None, None], past_key_values=cache)
            for index, layer in enumerate(cache.layers):
                if layer.keys is not None:  # not those that share the keys of another one
                    found = [float(states.abs().max()) for states in (layer.keys, layer.values)]
                    largest[index] = list(map(max, found, largest.get(index, found)))
    layers = find_attention_layers(model)
    scales = calibrated(model, layers, list(rows))
    assert scales == calibrated(model, layers, list(rows), chunk=7)
    for layer, (index, *both) in zip(layers, scales, strict=True):
        assert index == layer.index
        assert [448 * scale for scale in both] == pytest.approx(largest[layer.keys_of], rel=1e-5)


@torch.no_grad()
def test_states_are_divided_before_they_are_cast_and_multiplied_after():
    model = small()
    with quantized(model, "vllm:fp8;scales=1:0.37:0.011") as factory:
        cache = factory()
        model(ids(24, 1), past_key_values=cache)
    for layer, scales in ((0, (1.0, 1.0)), (1, (0.37, 0.011))):
        for name, scale in zip(("keys", "values"), scales, strict=True):
            raw = getattr(cache.layers[layer], f"raw_{name}")
            stored = (raw / scale).to(torch.float8_e4m3fn).float() * scale
            assert torch.equal(getattr(cache.layers[layer], name), stored)
    with pytest.raises(ValueError, match="scales names layer 2"):
        plan_layers(find_attention_layers(model), Scheme.parse("vllm:fp8;scales=2:1:1"))


def test_scales_mend_a_model_whose_keys_are_too_large_for_fp8():
    """Keys a thousand times as large and queries as much smaller: no logit moves, and scale 1 clips at 448."""
    model = small()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight *= 1000
            layer.self_attn.q_proj.weight /= 1000
    suite = EvalSuite(EvalSpec([56], windows=2, tasks=()), TOKENIZER, text=ENGLISH)
    methods = ["default", "p_rope:p=0.5"]
    check = rope_patch.kv_check(model, None, ["vllm:fp8", "int8-token"], suite, methods=methods, calibrate="builtin")
    for method in methods:
        _, clipped, _, mended = check.of(method)
        assert mended.format == "vllm:fp8 calibrated"
        assert mended.divergence.kl < clipped.divergence.kl / 10
        assert check.verdict(clipped, 56).kind == "unsafe"
    first, second = (Scheme.parse(check.of(method)[3].format_text).scales for method in methods)
    assert first != second, "another table makes other keys"


def test_full_precision_is_measured_where_transformers_would_round_by_a_checkpoints_scales():
    """compressed-tensors rounds keys in the forward of an attention, unless its ``quantization_enabled`` is off."""
    model = small()
    plain = small()
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.register_buffer("k_scale", torch.tensor(1.0))

        def rounded(module, args, keys, attention=attention):
            return keys.round() if getattr(attention, "quantization_enabled", True) else keys

        attention.k_proj.register_forward_hook(rounded)
    suite = EvalSuite(EvalSpec([56], windows=2, tasks=()), TOKENIZER, text=ENGLISH)
    checks = [rope_patch.kv_check(one, None, ["fp8"], suite) for one in (model, plain)]
    assert not torch.equal(model(ids()).logits, plain(ids()).logits)
    for row, expected in zip(*(check.rows for check in checks), strict=True):
        assert row.scores == expected.scores
