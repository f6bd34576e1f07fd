"""The rotary tables of vLLM."""

import os
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


def version() -> str:
    """Return the version of vLLM."""
    import vllm

    return str(vllm.__version__)


def model_of(path: str) -> tuple[Any, Any]:
    """Return the model of a checkpoint without its weights, and vLLM's own config."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader.utils import initialize_model

    arguments = EngineArgs(path, load_format="dummy", enforce_eager=True, skip_tokenizer_init=True, dtype="float32")
    config = arguments.create_engine_config()
    rotary_embedding._ROPE_DICT.clear()  # the tables of the checkpoint before
    with set_current_vllm_config(config):
        _one_process()
        with torch.device("meta"):
            return initialize_model(vllm_config=config), config


def layers_of(model: tuple[Any, Any]) -> dict[str, Any]:
    """Return the context and the layers of a model."""
    network, config = model
    context = config.model_config.max_model_len
    layers = []
    for module in network.modules():
        attention: Any = getattr(module, "attn", None)
        if hasattr(attention, "kv_cache_dtype"):
            rotary = getattr(module, "rotary_emb", None)
            cos = sin = None
            if rotary is not None:
                table = _table(rotary)
                context = min(context, len(table))  # it has no cos and sin for positions beyond
                cos, sin = _at_position_1(table)
            layers.append({"cos": cos, "sin": sin, "window": attention.sliding_window})
    if all(layer["cos"] is None for layer in layers):
        if "transformers" not in type(network).__module__:
            raise NotImplementedError("no layer has a rotary table where it was looked for")
        layers = _of_transformers(config, layers)
    return {"context": context, "layers": layers}


def _of_transformers(config: Any, layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return layers with their tables where vLLM runs those of transformers, with attention of its own."""
    import transformers_layers
    from vllm.config import set_current_vllm_config

    try:
        with set_current_vllm_config(config):
            tables = transformers_layers.layers_of(transformers_layers.model_of(config.model_config.model))["layers"]
        return [table | {"window": layer["window"]} for table, layer in zip(tables, layers, strict=True)]
    except Exception as error:  # vLLM itself has built the model, so that this says nothing of it
        raise NotImplementedError(f"the layers of transformers could not be read: {error}") from error


def _one_process() -> None:
    """Make the groups of processes that a model asks for, of one; mixtures of experts want more of them than others."""
    from vllm import distributed

    port = 20000 + os.getpid() % 20000
    if not distributed.parallel_state.model_parallel_is_initialized():
        distributed.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
    distributed.destroy_model_parallel()
    distributed.ensure_model_parallel_initialized(1, 1)


def _table(rotary: Any) -> Any:
    """Return cos and sin of a rotary module, (positions, pairs)."""
    import torch

    with torch.device("cpu"):
        if hasattr(rotary, "long_factor"):  # longrope: of its two tables the one for the whole context
            length = rotary.max_position_embeddings
            kind = "short"
            if length > rotary.original_max_position_embeddings:
                kind = "long"
            factors = (getattr(rotary, f"{kind}_factor"), getattr(rotary, f"{kind}_mscale"))
            return rotary._compute_cos_sin_cache(length, *factors)
        return rotary._compute_cos_sin_cache()


def _at_position_1(table: Any) -> tuple[list[float], list[float]]:
    if table.is_complex():  # Llama 4
        cos, sin = table[1].real, table[1].imag
    else:
        cos, sin = table[1].float().chunk(2, -1)
    return cos.flatten().tolist(), sin.flatten().tolist()
