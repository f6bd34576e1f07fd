"""LoRA adapters as GGUF files, for llama.cpp to add to a patched base while it runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from rope_patch.checkpoints.adapters import adapter_base, adapter_config, is_adapter, read_record
from rope_patch.checkpoints.gguf_file import Key, Piece, Progress, check_out, gguf, write_gguf
from rope_patch.checkpoints.gguf_table import RECORD_KEY, graph_of
from rope_patch.checkpoints.offline import skeleton
from rope_patch.errors import blamed_on
from rope_patch.exporting.gguf_weights import heads_of, to_interleaved
from rope_patch.patching.locate import find_rotary

_MERGE = "export it merged, without --lora"
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq")


def export_gguf_lora(
    adapter: str | Path, out: str | Path, *, overwrite: bool = False, on_progress: Progress = lambda name: None
) -> Path:
    """Write a LoRA adapter over a Llama or Mistral checkpoint as a GGUF adapter.

    An adapter says nothing of positions in llama.cpp either: it belongs on the GGUF of its base *with the table it was
    trained under*, from :func:`~rope_patch.exporting.gguf.export_gguf`. First patch, then add: the adapter's record is
    kept in the file. Rows of queries and keys are reordered as the base's are; a scaling other than ``alpha / rank``
    (rank-stabilised, or by module) is multiplied into ``B``, since the engine knows no other.

    Args:
        adapter: folder of a PEFT adapter, with safetensors.
        out: the file, ``*.gguf``.
        overwrite: replace a file that exists.
        on_progress: called with the name of each tensor before it is written.

    Returns:
        ``out``.

    Raises:
        ValueError: no LoRA, or one with parts llama.cpp would drop: trained norms, embeddings or biases, DoRA.
        OSError: nothing to load, an unwritable ``out``, a full disk; ``out`` is then as it was.
    """
    gguf()
    out = check_out(out, overwrite=overwrite)
    if not is_adapter(adapter):
        raise ValueError(f"{adapter} holds no adapter (adapter_config.json)")
    lora = _config(adapter)
    model = skeleton(adapter_base(adapter), beside_adapter=True)
    config: Any = find_rotary(model).config
    if graph_of(config.model_type).architecture != "llama":
        raise ValueError(f"GGUF adapters are written over Llama and Mistral, not over {config.model_type}: {_MERGE}")
    record = read_record(adapter)
    keys = [
        Key.of("general.architecture", "llama", "STRING"),
        Key.of("general.type", "adapter", "STRING"),
        Key.of("general.name", Path(adapter).resolve().name, "STRING"),
        Key.of("adapter.type", "lora", "STRING"),
        Key.of("adapter.lora.alpha", float(lora.lora_alpha), "FLOAT32"),
    ]
    if record is not None:
        keys.append(Key.of(RECORD_KEY, json.dumps(record.to_dict()), "STRING"))
    weights = Path(adapter) / "adapter_model.safetensors"
    if not weights.is_file():
        raise FileNotFoundError(f"{adapter} has no adapter_model.safetensors: save the adapter in a local folder")
    with ExitStack() as files:
        try:
            file = files.enter_context(safe_open(weights, framework="pt"))
        except SafetensorError as error:
            raise OSError(f"{weights} is truncated or damaged ({error}): copy it again") from error
        files.enter_context(blamed_on(f"{adapter}: its adapter_config.json and its weights do not fit each other"))
        pieces = list(_pieces(file, lora, config))
        return write_gguf(out, keys, pieces, overwrite=overwrite, progress=on_progress)


def _config(adapter: str | Path) -> Any:
    """Return an adapter's config, or raise where llama.cpp would compute something else."""
    lora: Any = adapter_config(adapter)
    if str(getattr(lora.peft_type, "value", lora.peft_type)) != "LORA":
        raise ValueError(f"{adapter} is {lora.peft_type}, and llama.cpp adds LoRA alone: {_MERGE}")
    init = str(lora.init_lora_weights).lower()
    refused = {
        f"trained {lora.modules_to_save} whole, which llama.cpp drops": lora.modules_to_save,
        "trained single tokens": lora.trainable_token_indices,
        "is DoRA, which scales columns by their norm": lora.use_dora,
        "trained biases": lora.bias != "none" or lora.lora_bias,
        "repeats layers": lora.layer_replication,
        "is switched on by tokens (aLoRA)": getattr(lora, "alora_invocation_tokens", None),
        f"changed the base's weights when it began ({init})": init.startswith(_CHANGE_THE_BASE),
        "has a scaling of zero": not lora.lora_alpha,
    }
    for reason, applies in refused.items():
        if applies:
            raise ValueError(f"{adapter} {reason}: {_MERGE}")
    return lora


def _pieces(file: Any, lora: Any, config: Any) -> Iterator[Piece]:
    package = gguf()
    names = package.get_tensor_name_map(package.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for stored in sorted(file.keys()):
        module, _, part = stored.removeprefix("base_model.model.").partition(".lora_")
        if part not in ("A.weight", "B.weight"):
            raise ValueError(f"the adapter holds {stored}, which is no LoRA of a linear layer: {_MERGE}")
        renamed = names.get_name(module)
        tied = module == "lm_head" and config.tie_word_embeddings
        if renamed is None or tied:
            raise ValueError(f"llama.cpp's graph for llama has no place for the adapter's {stored}: {_MERGE}")
        shape = tuple(file.get_slice(stored).get_shape())
        yield Piece(
            f"{renamed}.weight.lora_{part[0].lower()}",
            shape,
            package.GGMLQuantizationType.F32,
            lambda name=stored, module=module: _read(file, name, module, lora, config),  # type: ignore[misc]
        )


def _read(file: Any, name: str, module: str, lora: Any, config: Any) -> np.ndarray[Any, Any]:
    tensor = file.get_tensor(name).float()
    if name.endswith(".lora_B.weight"):
        tensor = tensor * _beyond_the_engine(lora, module, tensor.shape[1])
        heads = heads_of(f"{module}.", config)
        tensor = tensor if heads is None else to_interleaved(tensor, heads)
    numbers: np.ndarray[Any, Any] = tensor.contiguous().numpy()
    return numbers


def _beyond_the_engine(lora: Any, module: str, rank: int) -> float:
    """Return what the engine's own scaling, ``lora_alpha / rank``, lacks for a module; 1 for an ordinary LoRA."""
    from peft.utils.other import get_pattern_key

    alpha = lora.alpha_pattern.get(get_pattern_key(lora.alpha_pattern.keys(), module), lora.lora_alpha)
    return float(alpha / lora.lora_alpha * (rank**0.5 if lora.use_rslora else 1.0))
