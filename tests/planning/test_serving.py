"""Plans of serving against real caches, and against the number of tokens that vLLM prints."""

import json

import pytest
import torch
from support.commands import fail, run
from support.tiny import tiny_config
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, DynamicCache

import family_models
from rope_patch.kv_cache.schemes import Scheme
from rope_patch.planning.serving import model_cache
from rope_patch.planning.shapes import named_model
from rope_patch.runtime.packaged import data_path

GIB = 2**30
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
# A window of 64: transformers keeps 63 tokens between two steps, and the plan counts the 64 of a step.
FAMILIES = {
    "llama": {},
    "qwen3": {"num_key_value_heads": 1},
    "mistral": {"sliding_window": 64},
    "gemma3": MIXED,
    "gpt_oss": MIXED,
    "gemma4-shared": {"layer_types": MIXED["layer_types"] * 2, "sliding_window": 64},
    "llama4_text": {"attention_chunk_size": 64},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "minicpm3": {},
}
HYBRID = ["bamba", "qwen3_next", "lfm2_moe", "falcon_h1", "nemotron_h"]
SPARSE = ["deepseek_v32", "deepseek_v4"]
"""Models that store more for each token than keys and values."""


def without_weights(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def cached_bytes(config, length):
    """The size of all that a real cache holds after a text [bytes]."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(torch.randint(3, 90, (1, length)), past_key_values=cache, use_cache=True)
    leaves = tree_leaves([vars(layer) for layer in cache.layers])
    # DeepSeek V4 stores one tensor as keys and values.
    return sum({id(x): x.nbytes for x in leaves if isinstance(x, torch.Tensor)}.values())


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRID, *SPARSE])
def test_a_plan_is_within_3_percent_of_a_real_cache(family):
    if family in FAMILIES:
        config = tiny_config(family, **FAMILIES[family])
    else:
        config = family_models.tiny_config(family)
    cache = model_cache(without_weights(config))
    stored = cache.stored(Scheme())
    # DeepSeek V4 compresses 128 tokens at a time, and keeps those that are too few for that as they are.
    for length in (128, 384) if family == "deepseek_v4" else (40, 111):
        assert cache.size(stored, length) == pytest.approx(cached_bytes(config, length), rel=0.03)
    assert (cache.constant > 1000) == (family in [*HYBRID, "deepseek_v4"])
    assert (cache.growth > 0) == (family in SPARSE)


def test_latents_are_counted_and_not_the_heads_that_are_made_of_them():
    config = tiny_config("deepseek_v3")
    cache = model_cache(without_weights(config))
    token = 2 * config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim)
    assert cache.size(cache.stored(Scheme()), 1000) == 1000 * token


# vLLM 0.32.0 on a CPU with VLLM_CPU_KVCACHE_SPACE=1 and bfloat16 printed these at its start, for contexts of 256 and
# 2048 tokens: it has whole blocks of 128 tokens. The second model has latents of 512 and rotary keys of 64 features.
PRINTED = {("llama", "none"): 349_440, ("llama", "vllm:fp8"): 699_008, ("deepseek_v2", "none"): 232_960}
LATENT = {"num_hidden_layers": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


@pytest.mark.parametrize(("name", "form"), PRINTED)
def test_tokens_are_those_that_vllm_prints(name, form):
    if name == "llama":
        model, _ = named_model(data_path("assets") / name)
    else:
        model = without_weights(tiny_config(name, **LATENT))
    cache = model_cache(model)
    stored = cache.stored(Scheme.parse(form))
    printed = PRINTED[name, form]
    assert cache.size(stored, printed) <= GIB < cache.size(stored, round(1.001 * printed))


# --- the command -----------------------------------------------------------------------------------------------------


def planned(*words):
    return json.loads(run("plan", "Llama-3.1-8B", "--serve", "--gpu-memory", "24", *words, "--json"))


def test_rows_by_hand():
    """8,030,261,248 parameters; 32 layers with 8 heads of 128 features, keys and values."""
    data = planned("--formats", "none vllm:fp8 vllm:turboquant_k8v4", "--requests", "4")
    room = 0.92 * 24 * GIB - 2 * 8_030_261_248
    assert (data["model"], data["weights_bytes"]) == ("Llama-3.1-8B", 2 * 8_030_261_248)
    assert data["room_bytes"] == pytest.approx(room)
    none, fp8, turbo = data["rows"]
    assert none == {
        "format": "none",
        "bytes_per_token": 131072,
        "tokens": room // 131072,
        "tokens_each": room / 4 // 131072,
    }
    assert (fp8["bytes_per_token"], fp8["tokens"]) == (65536, room // 65536)
    # 28 layers with keys of 8 bits and values of 4 and two numbers of 16 for each head; 4 in full precision.
    assert turbo["bytes_per_token"] == 28 * 1024 * (1 + 0.5 + 4 / 128) + 4 * 4096


def test_sliding_layers_hold_no_more_than_their_window():
    """gemma-3-1b: 22 layers hold 512 tokens, 4 all of them, a head of 256 features each."""
    (row,) = json.loads(
        run("plan", "gemma-3-1b", "--serve", "--gpu-memory", "8", "--formats", "none", "--requests", "1", "--json")
    )["rows"]
    room = 0.92 * 8 * GIB - 2 * 999_885_952 - 22 * 512 * 1024
    assert row["tokens"] == row["tokens_each"] == pytest.approx(room / (4 * 1024), abs=1)


def test_the_table_and_the_size_of_quantized_weights():
    printed = run("plan", "Llama-3.2-1B", "--serve", "--gpu-memory", "8", "--weights", "4.5")
    assert "vLLM takes 92%" in printed and "4.50 GiB" in printed and "2.86 GiB are left" in printed
    assert "32,768" in printed and f"{int((0.92 * 8 - 4.5) * GIB / 32768):,}" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "missing --gpu-memory"),
        (("--gpu-memory", "24", "--length", "4k"), "unknown option --length"),
        (("--gpu-memory", "24", "--lora-rank", "8"), "plan --serve --help"),
        (("--gpu-memory", "24", "--formats", "k=int4;v=int4;rope=full"), "takes no rope="),
        (("--gpu-memory", "24", "--formats", "k=int4;v=int4;skip=16"), "skip=16: skip names layer 16"),
        (("--gpu-memory", "2"), "weights take 2.30 GiB"),
    ],
)
def test_wrong_arguments(words, message):
    assert message in fail("plan", "Llama-3.2-1B", "--serve", *words)


def test_other_commands_do_not_serve():
    assert "unknown command 'compare --serve'" in fail("compare", "Llama-3.1-8B", "--serve")
    assert "unknown option --formats" in fail("plan", "Llama-3.1-8B", "--length", "4k", "--formats", "none")


def test_models_whose_cache_cannot_be_counted(tmp_path):
    family_models.tiny_model("mamba").save_pretrained(tmp_path / "mamba")
    assert "caches no keys" in fail("plan", tmp_path / "mamba", "--serve", "--gpu-memory", "1")
    family_models.tiny_model("dbrx").save_pretrained(tmp_path / "dbrx")
    assert "DbrxForCausalLM caches cannot be read" in fail("plan", tmp_path / "dbrx", "--serve", "--gpu-memory", "1")
