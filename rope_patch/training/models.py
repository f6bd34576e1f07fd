"""What a run decides about its model: the arguments of the patch and of the adapters; and its memory."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

from accelerate.parallelism_config import ParallelismConfig
from transformers import PreTrainedModel

from rope_patch.checkpoints.adapters import ADAPTER_FILE
from rope_patch.checkpoints.source_files import load_config
from rope_patch.modeling.after_decoder import decoder_path
from rope_patch.options.finetune import ModelOptions, RecipeOptions
from rope_patch.options.plan import ALL_LINEAR
from rope_patch.patching.locate import locate
from rope_patch.patching.record import PatchRecord
from rope_patch.planning import Plan, plan
from rope_patch.runtime.folders import is_gguf
from rope_patch.runtime.packaged import data_path

# Small reference checkpoints that come with the package, to try a recipe without a download.
BUNDLED_MODELS = ("llama", "gemma3")


def bundled_folder_or_name(name: str) -> str:
    """Return the folder of a bundled checkpoint, or the name itself; a folder of that name here has precedence.

    Example:
        >>> bundled_folder_or_name("meta-llama/Llama-3.1-8B")
        'meta-llama/Llama-3.1-8B'
    """
    if name in BUNDLED_MODELS and not Path(name).exists():
        return str(data_path("assets") / name)
    return name


def is_quantized(options: ModelOptions) -> bool:
    """Tell whether the weights of a checkpoint are quantized, as those of a GGUF file count.

    Raises:
        ValueError: they are, and ``model.quantization`` is set; or the name is an adapter's.
    """
    source = bundled_folder_or_name(options.name)
    if Path(source, ADAPTER_FILE).is_file():
        raise ValueError(
            f"{options.name} is an adapter: merge it into its base first (merge_and_unload), and save that"
        )
    config = load_config(source, revision=options.revision, trust_remote_code=options.trust_remote_code)
    quantized = is_gguf(source) or getattr(config, "quantization_config", None) is not None
    if quantized and options.quantization != "none":
        raise ValueError(f"{options.name} is quantized already: set model.quantization=none")
    return quantized


def patch_arguments(model: PreTrainedModel, options: RecipeOptions) -> dict[str, Any] | None:
    """Return the arguments of :func:`rope_patch.apply` behind the method; None if the checkpoint keeps its own patch.

    Raises:
        ValueError: the checkpoint has a patch already that does not fit the options, or no layer that rotates sees far
            enough for a longer context to need a patch.
    """
    patch = options.patch
    location = locate(model)
    if patch.method is None and location.record is not None:
        _check_own_patch(location.record, options)
        return None
    if patch.method is None:
        warnings.warn(
            "there is no patch.method: the model keeps its original rotary table, so only its weights adapt to "
            "longer rows; choose a method with `rope-patch methods`, or set patch.method=default to say so",
            stacklevel=2,
        )
    stated: int = location.config.max_position_embeddings
    if options.target_length > stated and patch.method not in (None, "default"):
        location.check_windowed()
    arguments = patch.patching.arguments()
    if options.target_length >= stated:  # the longest row, where no target is given
        arguments["target_length"] = options.target_length
    return arguments | {"replace": patch.replace}


def _check_own_patch(own: PatchRecord, options: RecipeOptions) -> None:
    """Refuse options that would be ignored because the checkpoint keeps its patch, and rows beyond its context."""
    patching = options.patch.patching
    if patching.layer_types or patching.freeze_at or options.patch.replace:
        raise ValueError(
            "patch.layer_types, freeze_at and replace need patch.method: without it the checkpoint keeps its own "
            f"{own.to_method()}"
        )
    if own.target_length is not None and options.target_length > own.target_length:
        raise ValueError(
            f"the checkpoint's own {own.to_method()} was applied for a context of {own.target_length} tokens, not of "
            f"{options.target_length}: give a shorter train.max_length or patch.target_length, or patch.method with "
            "patch.replace=true"
        )


def lora_arguments(model: PreTrainedModel, options: RecipeOptions) -> dict[str, Any]:
    """Return the arguments of PEFT's ``LoraConfig``: those of the options, and defaults for long contexts.

    Only attention and MLP of the text decoder get an adapter; PEFT's ``all-linear`` alone has vision towers, too.
    """
    decoder = decoder_path(model)[-1]
    path = next(name for name, module in model.named_modules() if module is decoder)
    arguments = {"r": 16, "target_modules": ALL_LINEAR, "task_type": "CAUSAL_LM", "revision": options.model.revision}
    arguments["lora_alpha"] = 2 * options.lora_rank
    arguments["exclude_modules"] = rf"(?!{re.escape(path)}\.layers\..*(attn|mlp)).*"
    return arguments | options.lora


def training_plan(options: RecipeOptions, args: Any) -> Plan | None:
    """Return the memory plan of one forward and backward pass; None, with a warning, if a plan does not cover the run.

    Args:
        options: the options of the run.
        args: the ``SFTConfig`` of the run.
    """
    targets = options.lora.get("target_modules", ALL_LINEAR)
    if isinstance(targets, str):
        targets = [targets]
    boundaries = "apart"
    if args.packing_strategy == "wrapped" or not args.packing:
        boundaries = "join"
    optimizer = str(args.optim.value).removeprefix("paged_").partition("_torch")[0]
    try:
        return plan(
            bundled_folder_or_name(options.model.name),
            length=options.max_length,
            batch=args.per_device_train_batch_size,
            lora_rank=options.lora_rank or None,
            target_modules=targets,
            quantization=options.model.quantization,
            optimizer=optimizer,
            checkpointing=args.gradient_checkpointing,
            attention=options.model.attention,
            dtype=options.model.dtype,
            boundaries=boundaries,
            gpus=args.world_size,
            context_parallel=ParallelismConfig().cp_size,
        )
    except (ValueError, OSError) as error:  # a run may be possible all the same
        warnings.warn(f"the memory of a training step is not predicted: {error}", stacklevel=2)
        return None
