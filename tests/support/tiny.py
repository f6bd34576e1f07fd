"""Tiny random models of every checked family, built offline."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

SIZE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "head_dim": 16}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZE),
    "mistral": MistralConfig(**SIZE, sliding_window=32),
    "qwen2": Qwen2Config(**SIZE),
    "qwen3": Qwen3Config(**SIZE, head_dim=16),
    "phi3": Phi3Config(**SIZE, original_max_position_embeddings=64),
    "gemma": GemmaConfig(**SIZE, head_dim=16),
    "gemma2": Gemma2Config(**SIZE, head_dim=16, sliding_window=16, query_pre_attn_scalar=16),
    "gemma3": Gemma3TextConfig(**SIZE, **MIXED, query_pre_attn_scalar=16),
    "gemma4": Gemma4TextConfig(
        **SIZE,
        **MIXED,
        global_head_dim=32,
        vocab_size_per_layer_input=96,
        hidden_size_per_layer_input=64,
    ),
}
ARCHITECTURES = list(CONFIGS)
MIXED_ARCHITECTURES = ("gemma3", "gemma4")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """A fresh copy of a family's config, changed."""
    config = copy.deepcopy(CONFIGS[family])
    if not changes:
        return config
    return type(config).from_dict({**config.to_dict(), **changes})


def tiny_model(
    family: str = "llama", *, seed: int = 0, attention: str | None = None, **changes: Any
) -> PreTrainedModel:
    """A tiny random model in eval mode, float32."""
    torch.manual_seed(seed)
    config = tiny_config(family, **changes)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def drawn_model(config: PreTrainedConfig, **parameters: Any) -> PreTrainedModel:
    """A model whose weights and biases are drawn, the same for every table.

    Args:
        config: the config of the model.
        **parameters: ``rope_parameters`` in place of those of the config.
    """
    config = copy.deepcopy(config)
    if parameters:
        config = type(config).from_dict({**config.to_dict(), "rope_parameters": parameters})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in model.parameters():
            weights += 0.1 * torch.randn(weights.shape, generator=generator)
    return model


def small(family: str = "llama", **changes: Any) -> PreTrainedModel:
    """A tiny model that reads the bundled tokenizer's ids."""
    return tiny_model(family, vocab_size=1024, initializer_range=0.2, **changes)


def ids(length: int = 48, batch: int = 2, seed: int = 0) -> torch.Tensor:
    """Random token ids (batch, length), none of them special."""
    return torch.randint(3, 96, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: torch.nn.Module, tokens: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
    """Logits of a full forward pass."""
    return model(ids() if tokens is None else tokens, use_cache=False, **kwargs).logits
