"""Tiny random models of every causal language model type of transformers, built offline from the config classes.

A recipe shrinks a type's default config by the names of its fields; ``OVERRIDES`` holds values for types that it does
not fit. tests/families runs every type; tests/support/tiny.py holds the smaller models of the other tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_DEPTHS = """num_hidden_layers num_layers n_layer n_layers decoder_layers encoder_layers num_decoder_layers
    num_encoder_layers depth num_blocks num_layers_per_stack conf_num_hidden_layers num_global_layers"""
LAYERS = 4
VOCABULARY = 96
# Standard deviation of the noise that tiny_model adds to every weight.
NOISE = 0.05
CONTEXT = 64
_SIZES = {
    LAYERS: f"""{_DEPTHS} num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads
        encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads
        conf_num_attention_heads index_n_heads linear_num_heads linear_num_key_heads linear_num_value_heads
        num_experts n_routed_experts num_local_experts moe_num_experts chunk_size mamba_chunk_size""",
    2: """num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads n_mamba_heads num_kv_shared_layers
        num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k zero_expert_num""",
    1: "n_group topk_group num_expert_group n_groups n_shared_experts first_k_dense_replace num_dense_layers",
    8: "mamba_n_heads mamba_num_heads",
    16: """sliding_window sliding_window_size attention_window_size window_size local_attention attention_chunk_size
        mamba_d_state state_size ssm_state_size""",
    32: """head_dim global_head_dim swa_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim index_head_dim rotary_dim
        linear_head_dim linear_key_head_dim linear_value_head_dim kv_lora_rank q_lora_rank o_lora_rank kv_channels
        attention_head_size dim_head d_head d_kv query_pre_attn_scalar hidden_size_per_layer_input mamba_d_head
        mamba_head_dim""",
    CONTEXT: "max_position_embeddings max_seq_len model_max_length qk_head_dim attention_head_dim",
    VOCABULARY: """vocab_size unpadded_vocab_size decoder_vocab_size vocab_size_per_layer_input
        encoder_hash_byte_group_vocab ngram_vocab_size_base""",
    128: """hidden_size d_model n_embd embed_dim dim emb_dim embedding_size hidden_size_global input_embedding_size
        output_embedding_size word_embed_proj_dim lru_width intermediate_size moe_intermediate_size decoder_ffn_dim
        encoder_ffn_dim ffn_dim d_ff shared_expert_intermediate_size shared_intermediate_size ffn_hidden_size
        expert_ffn_hidden_size intermediate_size_mlp dense_intermediate_size feed_forward_size dim_ff dff d_inner
        moe_shared_expert_intermediate_size shared_experts_intermediate_size embedding_dim backbone_hidden_size
        mlp_dim mamba_headdim ple_embed_dim n_positions n_ctx max_target_positions context_length""",
    256: "attention_hidden_size mamba_d_ssm",
}
SIZES = {name: size for size, names in _SIZES.items() for name in names.split()}
IDS = torch.randint(3, 90, (2, 80), generator=torch.Generator().manual_seed(0))
"""Token ids of two rows that are longer than the context, so that a table that changes with the length has an
effect."""
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 16}
_INDEXER["indexer_compress_ratio"] = 4
_SLIDING = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "head_dim": 64}
_SLIDING |= {"qk_nope_head_dim": 32, "v_head_dim": 32}
_DOTS3 = {"head_dim": 64} | {f"swa_{name}": value for name, value in _SLIDING.items()}

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": PLAIN}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4},
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {"adapter_in_dim": 128, "adapter_out_dim": 128},
        "audio_config": {"adapter_input_size": 128, "adapter_out_dim": 128},
    },
    "dots3_note_text": _DOTS3,
    "falcon_h1": {"mamba_d_head": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {
        "position_embedding_type": "rope",
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "hrm_text": {"num_hidden_layers": 2, "num_layers_per_stack": None},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 32},
    "ministral3": {"rope_parameters": {"max_position_embeddings": CONTEXT, "original_max_position_embeddings": 4}},
    "musicgen": {"decoder": {"num_codebooks": 2}},
    "musicgen_melody": {"decoder": {"num_codebooks": 2}},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "use_mem_rope": True},
}
"""Values for types that the recipe does not fit, or whose default config leaves rotary embeddings out."""
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")


def tiny_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the values that shrink a config: sizes by name, shorter lists per layer, and the same for its parts."""
    stated = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    small: dict[str, Any] = {}
    for name, value in stated.items():
        if isinstance(value, PreTrainedConfig):
            small[name] = tiny_settings(value) | ({"model_type": value.model_type} if value.model_type else {})
        elif isinstance(value, int) and not isinstance(value, bool) and name in SIZES:
            small[name] = min(value, SIZES[name])
        elif name == "rope_parameters" and value:
            small[name] = _cut_context(value)
        elif isinstance(value, list) and name in SIZES:  # one size for each layer
            small[name] = [min(size, SIZES[name]) for size in value]
        elif isinstance(value, (int, list)) and name.endswith(("token_id", "token_index")):
            small[name] = SPECIAL_TOKENS.get(name, VOCABULARY - 1)
    if "rope_parameters" not in stated:  # learned position embeddings end there, and IDS are longer than CONTEXT
        small |= {name: 2 * CONTEXT for name in ("max_position_embeddings", "max_seq_len") if name in small}
    if "kv_lora_rank" in small:  # latent attention has as many heads of keys as of queries
        small |= {name: small["num_attention_heads"] for name in ("num_key_value_heads",) if name in small}
    depth = next((stated[name] for name in _DEPTHS.split() if isinstance(stated.get(name), int)), 0)
    own = {name: small.get(name, stated[name]) for name in type(config).__dataclass_fields__ if name in stated}
    return small | _cut(own, depth)


def _cut_context(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary settings, by layer type or not, with the original context of the tiny model."""
    small = {key: _cut_context(value) if isinstance(value, dict) else value for key, value in parameters.items()}
    return small | {key: CONTEXT for key in ("original_max_position_embeddings",) if key in small}


def _cut(stated: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """Cut every list of one value per layer to the same few layers, so that each kind of layer is among them."""
    lists = {name: v for name, v in stated.items() if isinstance(v, (list, tuple)) and len(v) == depth > LAYERS}
    if not lists:
        return {}
    kinds = [str(values) for values in zip(*lists.values(), strict=True)]
    order = sorted(range(depth), key=lambda i: (kinds.index(kinds[i]) != i, i))
    return {name: [values[i] for i in sorted(order[:LAYERS])] for name, values in lists.items()}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Return a small config of a type."""
    cls, changes = CONFIG_MAPPING[model_type], OVERRIDES.get(model_type, {})
    try:
        start = cls()
    except Exception:  # the defaults of some types contradict each other
        start = cls(**changes)
    small = tiny_settings(start)
    for name, value in changes.items():
        small[name] = small[name] | value if isinstance(small.get(name), dict) and isinstance(value, dict) else value
    return cls(**small)


def tiny_model(model_type: str) -> Any:
    """Return a random model of a type in eval mode, float32; the same weights at every call.

    Noise is added to every weight, so that attention is no flat average and no gate is closed by a zero.
    """
    if model_type in ASSISTANTS:
        raise ValueError("it drafts for a main model: its forward pass takes that model's keys and values")
    config = tiny_config(model_type)
    torch.manual_seed(0)
    if hasattr(config, "decoder"):  # MusicGen's class takes the config of its decoder
        model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])(config.decoder)
    else:
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.is_floating_point():
                weights += NOISE * torch.randn_like(weights)
    return model.eval()


def in_own_memory(model: Any) -> Any:
    """Move the weights of a loaded model out of the mapped file, whose alignment decides the last bits of a product."""
    for weights in [*model.parameters(), *model.buffers()]:
        weights.data = weights.data.clone()
    return model.eval()
