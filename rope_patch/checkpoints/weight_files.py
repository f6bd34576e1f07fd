"""Check that a checkpoint's weights files are whole and belong to the model of its config. No weight is read."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.utils import logging as hf_logging

from rope_patch.patching.config_settings import silent_transformers
from rope_patch.runtime.captions import names_text
from rope_patch.runtime.errors import read_json

INDEX_FILE = "model.safetensors.index.json"


def check_weights(folder: Path) -> None:
    """Check that every weights file is there and whole.

    Opening a file is enough, since a safetensors header states how long the file must be.

    Raises:
        OSError: there are no weights, a shard is missing, or a file is cut or damaged.
    """
    if not any(path for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern)):
        raise OSError(f"{folder} holds no weights (*.safetensors)")
    for index in sorted(folder.glob("*.index.json")):
        missing = sorted(shard for shard in names_in_index(index) if not (folder / shard).is_file())
        if missing:
            raise OSError(f"{folder} lacks {', '.join(missing)}, which {index.name} names: copy or download it again")
    for path in sorted(folder.glob("*.safetensors")):
        with opened(path):
            pass


def refuse_repacked_weights(model: nn.Module) -> None:
    """Raise ValueError if bitsandbytes has repacked 4-bit weights for a CPU.

    It does so at the first forward pass in eval mode, and undoes it wrongly when the weights are saved (0.50.2): the
    scales stay rounded to bfloat16, and without double quantization they stay transposed. Neither the folder nor the
    model in memory would be right afterwards.

    Raises:
        ValueError: the model has such weights.
    """
    if any(getattr(getattr(p, "quant_state", None), "packing_format_for_cpu", False) for p in model.parameters()):
        raise ValueError(
            f"bitsandbytes repacked the 4-bit weights of this {type(model).__name__} for the CPU in a forward pass "
            "and would write them corrupted: load and patch it again, and save it before any forward pass in eval mode"
        )


OTHER_SHAPE = "of another shape"
"""What :func:`wrong_tensors` calls tensors that transformers refuses to load."""


def wrong_tensors(folder: Path, model: PreTrainedModel) -> str:
    """Say which tensors of a model are missing from a folder's safetensors files, or have another shape there.

    transformers fills a missing tensor with random values, different ones at each load, and reports it in a table that
    is easily overlooked. The names are compared by its own loader, without data, so that tensors that it renames or
    joins (the weights of experts) are treated as in a real load. Tensors that the model does not know do no harm by
    themselves, and only cause a warning.

    Nothing is compared in four cases: the config states a quantization, whose library has tensor names of its own; the
    class is not one of transformers; DeepSpeed ZeRO-3 is in use, which allows no such load; or the folder has no
    safetensors files.

    Args:
        folder: the folder of a checkpoint.
        model: a model of the class and config that the folder should hold; its weights are not used.

    Returns:
        A line on tensors that are missing, have another shape, or are unknown to the model; "" if all are there.
    """
    config = copy.deepcopy(model.config)
    stored = {name: tensor for path in model_files(folder) for name, tensor in outlines(path)}
    model_class: Any = getattr(transformers, (config.architectures or [""])[0], None)
    quantized = getattr(config, "quantization_config", None) is not None
    if not stored or model_class is None or quantized or is_deepspeed_zero3_enabled():
        return ""
    try:
        with silent_transformers(), _without_bars():
            _, loaded = model_class.from_pretrained(
                None,
                config=config,
                state_dict=stored,
                device_map="meta",
                attn_implementation="eager",  # the model's own may need a package or a registration
                ignore_mismatched_sizes=True,  # reported with the others, instead of raising
                output_loading_info=True,
            )
    except Exception as error:  # whatever it is, hours of training must not be lost because of a check
        warnings.warn(f"the tensors were not compared with {model_class.__name__}: {error}", stacklevel=3)
        return ""
    wrong = wrong_tensors_in_load(loaded)
    if not wrong and (unknown := loaded["unexpected_keys"]):
        left_out = f"transformers will leave out tensors that {model_class.__name__} does not have"
        warnings.warn(in_words({left_out: unknown}), stacklevel=3)
    return wrong


def wrong_tensors_in_load(loaded: Mapping[str, Any]) -> str:
    """Return the line that :func:`wrong_tensors` returns.

    Args:
        loaded: the report that ``from_pretrained`` returns for ``output_loading_info=True``.
    """
    shapes = [f"{name} ({list(stored)}, not {list(own)})" for name, stored, own in loaded["mismatched_keys"]]
    wrong = {"missing": loaded["missing_keys"], OTHER_SHAPE: shapes}
    if not any(wrong.values()):
        return ""
    # These are often the missing tensors under other names.
    return in_words(wrong | {"unknown to the model": loaded["unexpected_keys"]})


def in_words(wrong: Mapping[str, Collection[str]]) -> str:
    """Return a line with the first names of tensors of each kind, such as ``"missing"``; "" if there are none."""
    return "; ".join(f"{what}: {names_text(sorted(names), 3)}" for what, names in wrong.items() if names)


def model_files(folder: Path) -> list[Path]:
    """Return the safetensors files from which transformers loads a folder's model, or else those of its variants.

    Not every such file counts: beside them may lie Mistral's ``consolidated.safetensors``, an adapter, a trained table.
    """
    if (folder / INDEX_FILE).is_file():
        return sorted(folder / shard for shard in names_in_index(folder / INDEX_FILE))
    whole = folder / "model.safetensors"
    return [whole] if whole.is_file() else sorted(folder.glob("model.*.safetensors"))


def outlines(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each tensor in a file, and a tensor of its shape on the meta device."""
    with opened(path) as file:
        for name in file.keys():  # noqa: SIM118
            yield name, torch.empty(file.get_slice(name).get_shape(), device="meta")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file; one that is damaged is named.

    Raises:
        OSError: the file is truncated or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise OSError(f"{path} is truncated or damaged ({error}): copy or download it again") from error


def names_in_index(index: Path) -> set[str]:
    """Return the names of the weights files in an index.

    Raises:
        OSError: the index is damaged.
    """
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise OSError(f"{index} is damaged, its weight_map names no files: copy or download it again")
    return set(names.values())


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Hide the progress bars of transformers within a ``with`` block."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()
