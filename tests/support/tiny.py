"""Tiny random models, built offline: one list of the families that tests name, and of their variants."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from family_models import CONTEXT, PLAIN, SPECIAL_TOKENS, VOCABULARY
from rope_patch import data_path

LLAMA = data_path("assets") / "llama"
"""The bundled checkpoint."""

SIZE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    **SPECIAL_TOKENS,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "head_dim": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
LONGROPE |= {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [1.0, 1.5, 2.0, 3.0]}
MSCALE = {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16}
GEMMA4 = {"model_type": "gemma4_text", **MIXED, "global_head_dim": 32}
GEMMA4 |= {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 64}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16}
LATENT |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
EXPERTS = {"n_routed_experts": 8, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
DEEPSEEK = {"model_type": "deepseek_v3", **LATENT, **EXPERTS, "first_k_dense_replace": 1}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 32},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "phi3": {"original_max_position_embeddings": CONTEXT},
    "gemma": {"head_dim": 16},
    "gemma2": {**GEMMA, "sliding_window": 16},
    "gemma3": {"model_type": "gemma3_text", **MIXED, **GEMMA},
    "gemma4": GEMMA4,
    "phi": {"qk_layernorm": True},  # norms return (rows, heads, tokens, head_dim); half a head rotates
    "stablelm": {"qk_layernorm": True, "use_qkv_bias": True},
    "glm": {"head_dim": 16},  # interleaved pairs behind an ordinary table
    "ernie4_5": {"head_dim": 16},  # the same
    "cohere2": MIXED,  # the same behind a table that is interleaved, too, as in Cohere
    "llama-bias": {"model_type": "llama", "attention_bias": True},
    "llama-llama3": {"model_type": "llama", "rope_parameters": LLAMA3},
    "llama-yarn": {"model_type": "llama", "rope_parameters": YARN},
    "phi3-partial": {"model_type": "phi3", "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
    "gemma4-shared": {
        **{**GEMMA4, "num_hidden_layers": 4, "num_kv_shared_layers": 2},
        "layer_types": MIXED["layer_types"] * 2,
    },
    "gemma4-keys-are-values": {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "olmo3": MIXED,
    "gpt_oss": {
        **{"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 16},
        "rope_parameters": {**YARN, "factor": 2.0, "truncate": False},
    },
    "llama4_text": {
        **{"num_hidden_layers": 4, "head_dim": 16, "num_local_experts": 1, "intermediate_size_mlp": 32},
        **{"no_rope_layers": [1, 0, 1, 0], "attention_chunk_size": 32},
    },
    "qwen3_5_text": {"head_dim": 32, "layer_types": ["linear_attention", "full_attention"]},
    "deepseek_v2": {**DEEPSEEK, "model_type": "deepseek_v2", "topk_method": "greedy"},
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3-halves": {**DEEPSEEK, "rope_interleave": False},
    "deepseek_v3-yarn": {**DEEPSEEK, "rope_parameters": MSCALE},
    "minicpm3": LATENT,
    "minicpm3-longrope": {"model_type": "minicpm3", **LATENT, "rope_parameters": {**LONGROPE, "factor": 1.0}},
    "ministral3": {
        **{"head_dim": 16, "max_position_embeddings": 256},
        "rope_parameters": {
            **MSCALE,
            **{"factor": 16.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1},
        },
    },
}
"""What a small model of a family has besides ``SIZE``; a name with a hyphen is a variant of its ``model_type``."""
ARCHITECTURES = list(FAMILIES)[:9]
MIXED_ARCHITECTURES = ("gemma3", "gemma4")
LAYOUTS = ("cohere", "cohere2", "gpt_oss", "llama4_text", "qwen3_5_text")
"""Families that lay cos and sin out in ways of their own."""


def without_base(parameters: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings as the older ``rope_scaling`` has them, beside which the base stands."""
    return {key: value for key, value in parameters.items() if key != "rope_theta"}


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """A new config of a family, or of any type of transformers, changed."""
    settings = {"model_type": family, **SIZE, **FAMILIES.get(family, {}), **changes}
    # A config keeps the dictionaries that it is given, and a patch changes them.
    return AutoConfig.for_model(**copy.deepcopy(settings))


def tiny_model(
    family: str = "llama", *, seed: int = 0, attention: str | None = None, **changes: Any
) -> PreTrainedModel:
    """A tiny random model in eval mode, float32."""
    torch.manual_seed(seed)
    config = tiny_config(family, **changes)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def small(family: str = "llama", **changes: Any) -> PreTrainedModel:
    """A tiny model that reads the bundled tokenizer's ids, and whose attention is far from uniform."""
    if family.startswith("gemma4"):
        changes["vocab_size_per_layer_input"] = 1024
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return tiny_model(family, vocab_size=1024, initializer_range=0.2, **special, **changes)


def bundled_model(shape: str = "llama", dtype: Any = torch.float32) -> PreTrainedModel:
    """A bundled model, by default in float32."""
    return AutoModelForCausalLM.from_pretrained(LLAMA.parent / shape, dtype=dtype)


def ids(length: int = 48, batch: int = 2, seed: int = 0) -> torch.Tensor:
    """Random token ids (batch, length), none of them special."""
    return torch.randint(3, 96, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: torch.nn.Module, tokens: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
    """Logits of a full forward pass."""
    return model(ids() if tokens is None else tokens, use_cache=False, **kwargs).logits
