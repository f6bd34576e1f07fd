"""Packed caches of transformers: their bytes, counted by hand, and their limits as errors."""

import importlib.util

import pytest
import torch
from support.states import model_of
from support.tiny import ids, tiny_model
from transformers import DynamicCache, QuantizedCache

import rope_patch
from rope_patch.kv_cache.packed import check_packed, packed_caches

PROMPT, NEW = 40, 8
HELD = 2 * 2 * 2 * 16 * (PROMPT + NEW)  # elements: layers, keys and values, key heads, features, tokens


def installed(name):
    return importlib.util.find_spec(name) is not None


def test_bytes_of_fp8_by_hand():
    model, prompt = tiny_model("llama"), ids(PROMPT, 1)[0]
    (packed,) = packed_caches(model, prompt, ["fp8"], new_tokens=NEW, rounds=1)
    assert (packed.name, packed.tokens) == ("fp8", PROMPT + NEW)
    assert packed.full == 4 * HELD
    assert packed.stored == HELD + 4 * 4  # a byte each, and a float32 scale for keys and for values of both layers
    assert packed.bits == 16 * packed.stored / packed.full
    assert packed.seconds > 0 < packed.full_seconds


def test_tokens_are_those_of_generate():
    model, prompt = tiny_model("llama", initializer_range=0.3), ids(PROMPT, 1)
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    generated = [
        model.generate(prompt, past_key_values=cache, **options)[0, PROMPT:].tolist()
        for cache in (DynamicCache(config=model.config), QuantizedCache("fp8", model.config))
    ]
    same = next((i for i, (a, b) in enumerate(zip(*generated, strict=True)) if a != b), NEW)
    (packed,) = packed_caches(model, prompt[0], ["fp8"], new_tokens=NEW, rounds=1)
    assert packed.agree == same / NEW


def test_tokens_that_cross_the_switch_of_two_tables_are_those_of_the_long_one():
    model, prompt = tiny_model("llama", initializer_range=0.3), ids(PROMPT, 1)[0]
    with rope_patch.patched(model, "yarn:factor=4"):
        (alone,) = packed_caches(model, prompt, ["fp8"], new_tokens=NEW, rounds=1)
    rope_patch.apply(model, f"yarn:factor=4@{PROMPT + 2}")
    (packed,) = packed_caches(model, prompt, ["fp8"], new_tokens=NEW, rounds=1)
    assert packed.agree == alone.agree


@pytest.mark.skipif(not installed("hqq"), reason="hqq is not installed")
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_bytes_of_hqq_by_hand(bits):
    _packed(f"hqq-{bits}", bits)


@pytest.mark.skipif(not installed("optimum.quanto") if installed("optimum") else True, reason="needs optimum-quanto")
@pytest.mark.parametrize("bits", [2, 4])
def test_bytes_of_quanto_by_hand(bits):
    _packed(f"quanto-{bits}", bits)


def _packed(name, bits):
    (packed,) = packed_caches(tiny_model("llama"), ids(PROMPT, 1)[0], [name], new_tokens=NEW, rounds=1)
    rounded = HELD * PROMPT // (PROMPT + NEW)  # the prompt; what follows is in the residual window
    numbers = 2 * 4 * rounded // 16  # a scale and a zero point of float32 for each group of 16 features
    assert packed.stored == rounded * bits // 8 + numbers + 4 * (HELD - rounded)


@pytest.mark.parametrize(
    ("family", "name", "message"),
    [("llama", "fp9", "quanto-2"), ("gemma3", "fp8", "sliding_attention")],
)
def test_limits_are_errors(family, name, message):
    with pytest.raises(ValueError, match=message):
        check_packed(model_of(family), [name])


def test_a_backend_that_is_not_there(monkeypatch):
    import transformers.cache_utils

    monkeypatch.setattr(transformers.cache_utils, "is_optimum_quanto_available", lambda: False)
    with pytest.raises(ImportError, match="pip install"):
        check_packed(tiny_model("llama"), ["quanto-4"])


def test_heads_that_no_group_divides():
    model = tiny_model("llama", head_dim=24)
    with pytest.raises(ValueError, match="24"):
        check_packed(model, ["quanto-4"])
    check_packed(model, ["fp8"])


def test_nothing_to_decode():
    for prompt, options in ((torch.zeros(1, 4), {}), (torch.zeros(0), {}), (torch.zeros(4), {"rounds": 0})):
        with pytest.raises(ValueError, match="prompt"):
            packed_caches(tiny_model("llama"), prompt.long(), ["fp8"], **options)
