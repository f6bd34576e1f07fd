"""Tiny models with the rotary settings of published checkpoints that are scaled already."""

from __future__ import annotations

import math
from typing import Any

from support.subsets import full
from support.tiny import PLAIN, tiny_model

C = 16  # the context before any scaling


def yarn(factor: float, theta: float = 1e6, **more: Any) -> dict[str, Any]:
    """YaRN over the context before any scaling."""
    return {"rope_type": "yarn", "rope_theta": theta, "factor": factor, "original_max_position_embeddings": C, **more}


LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": C}
BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 16.0}
RELEASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "Llama 3.1": ("llama", 8, LLAMA3),
    "Apertus": ("apertus", 8, LLAMA3 | {"rope_theta": 12e6}),
    "Qwen3 with YaRN": ("qwen3", 4, yarn(4.0)),
    "Ministral 3": (
        "ministral3",
        16,
        yarn(16.0, **BETAS, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1),
    ),
    "gpt-oss": ("gpt_oss", 32, yarn(32.0, 15e4, **BETAS, truncate=False)),
    "Arcee": ("arcee", 20, yarn(20.0, 1e4, **BETAS, mscale=1.0)),
    "DeepSeek V2": ("deepseek_v2", 40, yarn(40.0, 1e4, **BETAS, mscale=0.707, mscale_all_dim=0.707)),
    "DeepSeek V3": ("deepseek_v3", 40, yarn(40.0, 1e4, **BETAS, mscale=1.0, mscale_all_dim=1.0)),
    "OLMo 3": (
        "olmo3",
        8,
        {
            "sliding_attention": PLAIN,
            "full_attention": yarn(8.0, 5e5, **BETAS, attention_factor=0.1 * math.log(8) + 1),
        },
    ),
    "Gemma 3 4B": (
        "gemma3",
        8,
        {"sliding_attention": PLAIN, "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}},
    ),
    "Gemma 4": (
        "gemma4",
        8,
        {
            "sliding_attention": PLAIN,
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.25,
                "factor": 2.0,
            },
        },
    ),
}
"""By release: the model type, the stated context over the one before, and the rotary settings."""

ALIKE = ("Apertus", "Qwen3 with YaRN", "Arcee", "DeepSeek V2")
"""Releases that are scaled as another one is."""

every_release = [full(name) if name in ALIKE else name for name in RELEASES]


def release(name: str, rope_parameters: Any = None, times: int = 1) -> Any:
    """A tiny random model of a release, by default with its own rotary settings and once the context it states."""
    family, stated, own = RELEASES[name]
    return tiny_model(family, rope_parameters=rope_parameters or own, max_position_embeddings=times * stated * C)
