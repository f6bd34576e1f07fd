"""``doctor`` raises no false alarm: published rotary settings of many families, in memory and in a folder."""

from __future__ import annotations

import pytest
import torch
from support.tiny import LLAMA3, MIXED, SIZE, YARN
from transformers import AutoConfig, AutoModelForCausalLM

from rope_patch import doctor

PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
EXTENDED = {"max_position_embeddings": 256}
HEALTHY = {
    "llama": {"rope_parameters": LLAMA3, **EXTENDED},
    "qwen2": {"rope_parameters": {"rope_theta": 1e6, **PLAIN}, "layer_types": ["full_attention"] * 2},
    "qwen3": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 4.0}, "head_dim": 16},
    "phi3": {
        "rope_parameters": {**LONGROPE, "short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]},
        "original_max_position_embeddings": 64,
        **EXTENDED,
    },
    "gpt_neox": {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25}},
    "gpt_oss": {"rope_parameters": {**YARN, "truncate": False}, "head_dim": 16, "num_local_experts": 4, **EXTENDED},
    "gemma3_text": {
        "rope_parameters": {
            "sliding_attention": PLAIN,
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
        **MIXED,
    },
    "gemma4_text": {
        "global_head_dim": 32,
        "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 64,
        **MIXED,
    },
    "olmo3": {"rope_parameters": {"sliding_attention": PLAIN, "full_attention": YARN}, **MIXED, **EXTENDED},
    "modernbert-decoder": {"layer_types": MIXED["layer_types"]},
    "deepseek_v3": {
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4},
        **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16},
        **EXTENDED,
    },
    "hunyuan_v1_dense": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0},
        "head_dim": 16,
    },
    "mellum": {},  # it has settings for sliding layers, and no such layer
    "cohere2": {"layer_types": MIXED["layer_types"]},
    "glm4": {"head_dim": 16},
    "ministral3": {
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        "head_dim": 16,
        **EXTENDED,
    },
}
"""The config values of a tiny model of each type."""


@pytest.mark.parametrize("model_type", HEALTHY)
def test_a_healthy_model_is_well(model_type, tmp_path):
    config = AutoConfig.for_model(model_type, **{**SIZE, **HEALTHY[model_type]})
    model = AutoModelForCausalLM.from_config(config)
    assert doctor(model).ok, doctor(model)
    model.save_pretrained(tmp_path / "plain")
    assert doctor(tmp_path / "plain").ok, doctor(tmp_path / "plain")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    assert doctor(loaded).ok, doctor(loaded)
