"""Scales of an fp8 cache, one for the keys and one for the values of each layer: of a text, and in checkpoints."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rope_patch.checkpoints.adapters import CONFIG_FILE
from rope_patch.checkpoints.folder_patch import copy_with_new_config
from rope_patch.checkpoints.source_files import config_json
from rope_patch.checkpoints.weight_files import INDEX_FILE, model_files, opened, outlines
from rope_patch.kv_cache.cache import quantized
from rope_patch.kv_cache.formats import FP8_MAX
from rope_patch.kv_cache.layer import QuantizedLayer
from rope_patch.kv_cache.schemes import Scales, Scheme
from rope_patch.modeling.attention_layers import AttentionLayer
from rope_patch.modeling.reader import Reader
from rope_patch.modeling.temporary_modes import in_eval_mode

SCALES_FILE = "scales.safetensors"
"""The last file by name, as programs load them: a checkpoint may hold scales of its own, which these replace."""
WEIGHTS_FILE = "model-00001-of-00001.safetensors"


@torch.no_grad()
def calibrated(
    model: nn.Module, layers: Sequence[AttentionLayer], windows: Sequence[Tensor], chunk: int | None = None
) -> Scales:
    """Return the scales by which the largest key and the largest value of each layer become 448.

    *Source*: llm-compressor's observer of largest magnitudes, for one scale a tensor.

    Args:
        model: a causal language model of transformers.
        layers: its attention layers; those that share the keys of another one have its scales, too, as in vLLM.
        windows: the texts that are read (tokens,), with the cache in full precision.
        chunk: number of tokens in a forward pass; by default all.
    """
    reader = Reader(model)
    largest: dict[int, Tensor] = {}
    with quantized(model, Scheme(), layers=layers) as factory, in_eval_mode(model):
        for ids in windows:
            cache = factory()
            reader.states(ids[None], cache, chunk)
            for index, layer in enumerate(cache.layers):
                if isinstance(layer, QuantizedLayer) and layer.is_initialized:
                    both = torch.stack([layer.keys.abs().max(), layer.values.abs().max()]).float()
                    largest[index] = torch.maximum(both, largest.get(index, both))
    rounded = {index: (_scale(float(key)), _scale(float(value))) for index, (key, value) in largest.items()}
    return tuple((layer.index, *rounded[layer.keys_of]) for layer in layers)


def _scale(largest: float) -> float:
    """Return the scale by which a number becomes 448, in as few digits as the text of a scheme holds; 1 of 0."""
    return float(f"{largest / FP8_MAX:.6g}") or 1.0


@contextlib.contextmanager
def unrounded(model: nn.Module) -> Iterator[None]:
    """Keep compressed-tensors from rounding keys and values by a checkpoint's own scales within a ``with`` block.

    It does so in transformers wherever the config has a ``kv_cache_scheme``: full precision would be none.
    """
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "k_scale")]
    before = [getattr(module, "quantization_enabled", True) for module in modules]
    for module in modules:
        module.quantization_enabled = False
    try:
        yield
    finally:
        for module, enabled in zip(modules, before, strict=True):
            module.quantization_enabled = enabled


def with_scales(formats: Mapping[str, Scheme], scales: Scales, label: str) -> dict[str, Scheme]:
    """Return those of some formats that take scales, with these, under their names followed by a label."""
    return {
        f"{name} {label}": replace(scheme, scales=scales) for name, scheme in formats.items() if scheme.takes_scales
    }


def own_scales(folder: str | Path) -> Scales:
    """Return the scales that a folder's files hold as ``k_scale`` and ``v_scale``; none for a source of another kind.

    Those for each head are left out: vLLM reads them with FlashAttention alone.
    """
    found: dict[int, dict[str, float]] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with opened(path) as file:
            for name in file.keys():  # noqa: SIM118
                match = re.search(r"\.(\d+)\..*\b([kv])_scale$", name)
                if match and math.prod(file.get_slice(name).get_shape()) == 1:
                    found.setdefault(int(match[1]), {})[match[2]] = float(file.get_tensor(name))
    return tuple((layer, both.get("k", 1.0), both.get("v", 1.0)) for layer, both in sorted(found.items()))


def config_with_scales(source: str | Path) -> dict[str, Any]:
    """Return a checkpoint's config by which vLLM and compressed-tensors know that it has scales of an fp8 cache.

    Raises:
        ValueError: its weights are quantized in a way of another library, or it is an adapter or a GGUF file.
    """
    config = config_json(source)
    if not config:
        raise ValueError(f"scales are written beside a checkpoint's weights, and {source} has no {CONFIG_FILE}")
    known = config.get("quantization_config") or {"quant_method": "compressed-tensors", "config_groups": {}}
    if known["quant_method"] != "compressed-tensors":
        raise ValueError(
            f"scales are written in the format of compressed-tensors, and {source} is quantized by "
            f"{known['quant_method']}"
        )
    scheme = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}
    return config | {"quantization_config": known | {"kv_cache_scheme": scheme}}


def write_scales(source: str | Path, out: Path, scales: Scales) -> None:
    """Write a copy of a checkpoint that vLLM serves with scales of an fp8 cache; its weights are linked.

    vLLM 0.32 was seen to read them on a CPU. transformers needs the package compressed-tensors to load such a folder,
    and then rounds keys and values by these scales itself.

    Args:
        source: folder or hub id of the checkpoint.
        out: the folder that is written.
        scales: the scales.

    Raises:
        ValueError: its config or the names of its tensors are of a kind that is not known here.
    """
    with copy_with_new_config(source, out, overwrite=True, link_weights=True) as folder:
        (folder / CONFIG_FILE).write_text(json.dumps(config_with_scales(source), indent=2))
        files = {name: path.name for path in model_files(folder) for name, _ in outlines(path)}
        # As the files name them, which may be otherwise than the model does. Other towers have layers, too.
        found = [re.match(r"(.*\.(\d+)\.(?:self_attn|attn|attention|mixer))\.", name) for name in files]
        modules = {
            int(match[2]): match[1] for match in found if match and not re.search("vision|visual|audio", match[1])
        }
        if unknown := {layer for layer, *_ in scales} - modules.keys():
            raise ValueError(f"{source}: found no attention of layer {min(unknown)} among the names of the tensors")
        tensors = {}
        for layer, of_keys, of_values in scales:
            tensors[f"{modules[layer]}.k_scale"] = torch.tensor(of_keys)
            tensors[f"{modules[layer]}.v_scale"] = torch.tensor(of_values)
        (folder / SCALES_FILE).unlink(missing_ok=True)  # it may be a link to that of the source
        save_file(tensors, folder / SCALES_FILE, metadata={"format": "pt"})
        whole = folder / "model.safetensors"
        if whole.is_file():  # transformers would read it alone, and leave the scales at random numbers
            whole.rename(folder / WEIGHTS_FILE)
            files = dict.fromkeys(files, WEIGHTS_FILE)
        index = {"metadata": {}, "weight_map": files | dict.fromkeys(tensors, SCALES_FILE)}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2))
