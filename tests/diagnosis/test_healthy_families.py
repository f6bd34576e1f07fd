"""``doctor`` raises no false alarm: published rotary settings of many families, in memory and in a folder."""

import pytest
import torch
from support.releases import RELEASES, every_release, release
from support.tiny import LONGROPE, tiny_model
from transformers import AutoModelForCausalLM

from rope_patch import doctor

TWO_TABLES = {**LONGROPE, "short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]}
ALPHA = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}
HEALTHY = {
    "qwen3": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 4.0}},
    "phi3": {"rope_parameters": TWO_TABLES, "max_position_embeddings": 256},
    "hunyuan_v1_dense": {"rope_parameters": ALPHA, "head_dim": 16},
}
"""The settings of a tiny model of each type; tests/families has every type with its default settings."""


@pytest.mark.parametrize("name", [*every_release, *HEALTHY])
def test_a_healthy_model_is_well(name, tmp_path):
    if name in RELEASES:
        model = release(name)
    else:
        model = tiny_model(name, **HEALTHY[name])
    model.save_pretrained(tmp_path)
    for one in (model, tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)):
        assert doctor(one).ok, doctor(one)
