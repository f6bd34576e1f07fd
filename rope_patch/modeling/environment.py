"""What a measurement was made with: versions, device and data type, and the types of weights in a GGUF file."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from rope_patch.patching.locate import locate
from rope_patch.runtime.folders import is_gguf
from rope_patch.runtime.gguf_file import open_gguf
from rope_patch.version import __version__


def environment(model: nn.Module) -> dict[str, str]:
    """Return versions, device and data type of a measurement, and for a GGUF file the types of its weights."""
    parameter = next(model.parameters())
    device = str(parameter.device)
    if parameter.is_cuda:
        device = torch.cuda.get_device_name(parameter.device)
    return {
        "rope_patch": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device,
        "dtype": _precision_name(model, str(parameter.dtype).removeprefix("torch.")),
        **weights_in_file(model),
    }


def weights_in_file(model: nn.Module) -> dict[str, str]:
    """Return the type that a model's weights have in the GGUF file it came from, for the description of a measurement.

    Returns:
        ``{"weights": "dequantized Q4_1"}``; an empty dict if the model did not come from a GGUF file.
    """
    source = Path(str(locate(model).model.config.name_or_path))
    if not (is_gguf(source) and source.is_file()):
        return {}
    opened = open_gguf(source)
    weights = opened.weights
    if opened.is_quantized:
        weights = f"dequantized {weights}"
    return {"weights": weights}


def _precision_name(model: Any, dtype: str) -> str:
    config = getattr(model.config, "quantization_config", None)
    if config is None:
        return dtype
    config_values = config if isinstance(config, dict) else config.to_dict()
    bits = next((f" {n} bits" for n in (4, 8) if config_values.get(f"load_in_{n}bit")), "")
    return f"{config_values.get('quant_method', 'quantized')}{bits}, computed in {dtype}"
