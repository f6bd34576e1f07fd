"""Read the config of a checkpoint's folder or repository, with errors that say what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from rope_patch.checkpoints.adapters import CONFIG_FILE, find_file
from rope_patch.checkpoints.weight_files import in_words, outlines
from rope_patch.patching.locate import PatchError
from rope_patch.patching.older_keys import older_differences, text_part
from rope_patch.runtime.errors import as_value_error, in_one_line, read_json
from rope_patch.runtime.folders import check_source, is_gguf
from rope_patch.runtime.gguf_file import open_gguf
from rope_patch.runtime.gguf_headers import cached_headers


def config_json(source: str | Path, **hub: Any) -> dict[str, Any]:
    """Return the contents of a checkpoint's config.json; an empty dict if there is none."""
    path = find_file(source, CONFIG_FILE, **hub)
    config = {} if path is None else read_json(path)
    classes = config.get("architectures")
    if not isinstance(classes, list | None):
        raise ValueError(f"{path}: architectures must be a list of class names, got {classes!r}")
    return config


@contextlib.contextmanager
def named_for_transformers(source: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the arguments that name a source for ``from_pretrained`` of transformers, which is called in the block.

    The header of a GGUF file is read only once there.

    Args:
        source: folder, hub id or GGUF file.

    Raises:
        ValueError: it is not a whole GGUF file, or transformers cannot read it; the message names the file.
        FileNotFoundError: there is no such GGUF file.
        ImportError: it is a GGUF file, and the package gguf is missing.
    """
    if not is_gguf(source):
        yield {"pretrained_model_name_or_path": str(source)}
        return
    with cached_headers(source):
        open_gguf(source)  # its errors say what is wrong with the file
        with as_value_error(f"{source}: transformers cannot read this GGUF file"):
            yield {"pretrained_model_name_or_path": str(Path(source).parent), "gguf_file": Path(source).name}


def on_device(device: Any) -> dict[str, Any]:
    """Return the arguments with which ``from_pretrained`` of transformers loads weights onto a device.

    They are not held in host memory first. On a CPU there are none: some quantized weights refuse to be sent there.

    Args:
        device: a device of torch or its name, ``"balanced"``, or the device of each module.
    """
    if str(device).startswith("cpu"):
        return {}
    return {"device_map": device}


def placement(model: Any) -> Any:
    """Return where a model lies: its device, or the device of each module where they lie on several."""
    spread = getattr(model, "hf_device_map", None) or {}
    if len(set(spread.values())) > 1:
        return spread
    return model.device


def like(model: Any) -> dict[str, Any]:
    """Return the arguments with which ``from_pretrained`` loads another model as this one was: where, and in what."""
    attention = model.config._attn_implementation
    return {"dtype": model.dtype, "attn_implementation": attention, **on_device(placement(model))}


def cache_scales(source: str | Path) -> Iterator[str]:
    """Yield a sentence if a checkpoint has scales for a quantized cache, which transformers does not read.

    Args:
        source: a folder, whose weights files are looked into, a hub id or a GGUF file.
    """
    tensors = [name for path in Path(source).glob("*.safetensors") for name, _ in outlines(path)]
    names = [name for name in tensors if name.endswith((".k_scale", ".v_scale"))]
    if (config_json(source).get("quantization_config") or {}).get("kv_cache_scheme"):
        names.append("kv_cache_scheme")
    if names:
        what = "its scales of a quantized cache; kv-check measures vllm:fp8 with those that a local folder's files hold"
        yield in_words({what: names})


def check_older_keys(config: dict[str, Any], source: str | Path) -> None:
    """Raise PatchError if transformers 4 and transformers 5 would read different tables from a patched config.json.

    Args:
        config: the contents of the config.json.
        source: the checkpoint, for the message.

    Raises:
        PatchError: they would; the message names the differences.
    """
    if text_part(config).get("rope_patch") is None:
        return
    if wrong := older_differences(config):
        raise PatchError(
            f"{source}: transformers 4 and 5 would read different tables from its config.json:\n  " + "\n  ".join(wrong)
        )


def load_config(source: str | Path, **options: Any) -> PreTrainedConfig:
    """Return a checkpoint's config, from a folder, the hub or a GGUF file; errors say what to do.

    The config of a GGUF file is the one that transformers makes. Of the file's rotary table it has only the base.

    Args:
        source: folder, hub id or GGUF file.
        **options: arguments of ``AutoConfig.from_pretrained``.
    """
    path = Path(source) / CONFIG_FILE
    if path.is_file():
        read_json(path)  # its errors name the file
    with explained(source), named_for_transformers(source) as named:
        config: PreTrainedConfig = AutoConfig.from_pretrained(**named, **options)
    return config


def auto_class(model_type: str | None) -> Any:
    """Return the class of transformers that builds a checkpoint: the one for image-text models where it has no other.

    Args:
        model_type: that of the checkpoint's config.json; None where it has none.
    """
    only_with_images = (
        model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    return AutoModelForImageTextToText if only_with_images else AutoModelForCausalLM


def loader_name(source: str | Path) -> str:
    """Return the name of the class of transformers that loads a checkpoint."""
    name: str = auto_class(config_json(source).get("model_type")).__name__
    return name


def how_to_load(folder: str | Path) -> str:
    """Return the call of plain transformers that loads a folder."""
    return f"{loader_name(folder)}.from_pretrained({str(folder)!r})"


@contextlib.contextmanager
def naming_checkpoint(source: str | Path) -> Iterator[None]:
    """Name the checkpoint in errors about its config or weights that transformers raises within a ``with`` block.

    Raises:
        ValueError: transformers cannot build the model; the message says why.
    """
    try:
        with as_value_error(
            f"{source}: transformers cannot build the model from its config.json and the arguments given"
        ):
            yield
    except ValueError as error:
        if "ignore_mismatched_sizes" in str(error):
            raise ValueError(
                f"{source}: its weights have other shapes than config.json states: is it the config of another model?"
            ) from error
        reason = "holds no causal language model: load it with its own class of transformers"
        if "trust_remote_code" in str(error.__cause__):
            reason = "comes with code of its own, which is not run: load it with trust_remote_code=True if you trust it"
        elif "Unrecognized configuration class" not in str(error):
            raise
        raise ValueError(
            f"{source} {reason}, and give that model to rope_patch.apply, rope_patch.doctor or rope_patch.save"
        ) from error


@contextlib.contextmanager
def explained(source: str | Path) -> Iterator[None]:
    """Say what to do in errors of a loader of transformers within a ``with`` block, that of an unreachable hub too.

    Args:
        source: the folder or hub id that is loaded.

    Raises:
        ValueError: there is no such folder, it is an adapter, or transformers cannot build its model.
        OSError: the repository cannot be reached, or a weights file is damaged.
    """
    check_source(source)
    if Path(source).is_dir() and not (Path(source) / CONFIG_FILE).is_file():
        raise ValueError(f"{source} has no config.json, it is an adapter: give its base model")
    try:
        with naming_checkpoint(source):
            yield
    except SafetensorError as error:
        raise OSError(f"{source}: a weights file is truncated or damaged ({error}); copy it again") from error
    except OSError as error:
        if Path(source).exists():
            raise
        raise OSError(f"cannot load {source} from the hub ({in_one_line(error)})") from error
