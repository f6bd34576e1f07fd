"""``doctor`` raises no false alarm: published rotary settings of many families, in memory and in a folder."""

from __future__ import annotations

import pytest
import torch
from support.releases import RELEASES, every_release, release
from support.subsets import full
from support.tiny import MIXED, SIZE
from transformers import AutoConfig, AutoModelForCausalLM

from rope_patch import doctor

PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
HEALTHY = {
    "qwen2": {"rope_parameters": {"rope_theta": 1e6, **PLAIN}, "layer_types": ["full_attention"] * 2},
    "qwen3": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 4.0}, "head_dim": 16},
    "phi3": {
        "rope_parameters": {**LONGROPE, "short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]},
        "original_max_position_embeddings": 64,
        "max_position_embeddings": 256,
    },
    "gpt_neox": {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25}},
    "modernbert-decoder": {"layer_types": MIXED["layer_types"]},
    "hunyuan_v1_dense": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0},
        "head_dim": 16,
    },
    "mellum": {},  # it has settings for sliding layers, and no such layer
    "cohere2": {"layer_types": MIXED["layer_types"]},
    "glm4": {"head_dim": 16},
}
"""The config values of a tiny model of each type."""


ALIKE = ("qwen2", "gpt_neox", "modernbert-decoder", "cohere2", "glm4")


@pytest.mark.parametrize("name", every_release + [full(name) if name in ALIKE else name for name in HEALTHY])
def test_a_healthy_model_is_well(name, tmp_path):
    if name in RELEASES:
        model = release(name)
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZE | HEALTHY[name]))
    model.save_pretrained(tmp_path)
    for one in (model, tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)):
        assert doctor(one).ok, doctor(one)
