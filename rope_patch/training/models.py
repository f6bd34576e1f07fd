"""Loads the model of a run, patches it and adds adapters; predicts the memory of its training step."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase

from rope_patch import checkpoints
from rope_patch.checkpoints.adapters import ADAPTER_FILE
from rope_patch.checkpoints.model_without_weights import model_without_weights
from rope_patch.checkpoints.source_files import on_device
from rope_patch.modeling.after_decoder import decoder_path
from rope_patch.options.finetune import ModelOptions, RecipeOptions
from rope_patch.options.plan import ALL_LINEAR
from rope_patch.patching.install import apply
from rope_patch.patching.locate import locate
from rope_patch.patching.record import PatchRecord
from rope_patch.planning import Plan, plan
from rope_patch.runtime.folders import is_gguf
from rope_patch.runtime.packaged import data_path
from rope_patch.runtime.parallel import choose_device
from rope_patch.training.pack_rows import rows_per_step

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


def load_for_training(
    options: ModelOptions, compute: str = "bfloat16", *, weights: bool = True
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return model and tokenizer.

    Quantized weights are loaded onto this process's GPU, where there is one, and quantized while they are read.

    Args:
        options: the options of the checkpoint: its name, data type, quantization and attention kernel.
        compute: the data type in which products with quantized weights are computed.
        weights: whether to load the weights. Without them the model is on the meta device: the tensors of a folder are
            compared with the model's by name and shape; if they are quantized or on the hub, only the config is read.

    Raises:
        ValueError: ``model.quantization`` is set and the weights are quantized already, as those of GGUF files count;
            the name is an adapter's, or there is no such folder.
        OSError: there is nothing that can be loaded, or no such repository; the message says what to do.
    """
    dtype = getattr(torch, options.dtype)
    kernel = options.attention
    if kernel == "flash":
        kernel = "flash_attention_2"
    arguments: dict[str, Any] = {"dtype": dtype, "attn_implementation": kernel}
    shared: dict[str, Any] = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    source = bundled_folder_or_name(options.name)
    if Path(source, ADAPTER_FILE).is_file():
        raise ValueError(
            f"{options.name} is an adapter: merge it into its base first (merge_and_unload), and save that"
        )
    config = checkpoints.load_config(source, **shared)
    quantized = is_gguf(source) or getattr(config, "quantization_config", None)
    if quantized and options.quantization != "none":
        raise ValueError(f"{options.name} is quantized already: set model.quantization=none")
    load: Any = checkpoints.load
    if not weights:
        arguments["device_map"] = "meta"
        if quantized or not Path(source).is_dir():  # quantized tensors have other names and shapes
            load = model_without_weights
    elif options.quantization != "none":
        arguments["quantization_config"] = BitsAndBytesConfig(
            load_in_8bit=options.quantization == "8bit",
            load_in_4bit=options.quantization == "nf4",
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=getattr(torch, compute),
            bnb_4bit_quant_storage=dtype,  # so that FSDP can shard the packed weights with the others
        )
        arguments["device_map"] = {"": choose_device()}
    elif "WORLD_SIZE" not in os.environ:  # a launcher may spread the weights over its processes
        arguments |= on_device(choose_device())
    model = load(source, **arguments, **shared)
    if not weights:
        model.hf_device_map = {"": "meta"}  # so that Trainer leaves it there
    return model, checkpoints.read_tokenizer(source, **shared)


def prepare_model(model: PreTrainedModel, options: RecipeOptions) -> Any:
    """Patch a model in place and add adapters to it.

    Args:
        model: a model that :func:`load_for_training` returned; it is changed in place.
        options: the options of the run, whose sections ``patch`` and ``lora`` are read.

    Returns:
        A ``PeftModel``, or the model itself if every weight is trained.

    Raises:
        PatchError: the patch does not fit this model.
        ValueError: a name matches no projection (the known ones are listed), the checkpoint has a patch already that
            does not fit the options, or no layer that rotates sees far enough for a longer context to need a patch.
    """
    patch = options.patch
    lora = options.lora
    targets = ""
    if lora.rank:
        targets = target_pattern(model, lora.target_modules)  # raises before anything is changed
    location = locate(model)
    own = location.record
    if patch.method is None and own is not None:
        _check_own_patch(own, options)
    else:
        if patch.method is None:
            warnings.warn(
                "there is no patch.method: the model keeps its original rotary table, so only its weights adapt to "
                "longer rows; choose a method with `rope-patch methods`, or set patch.method=default to say so",
                stacklevel=2,
            )
        stated: int = location.config.max_position_embeddings
        if options.target_length > stated and patch.method not in (None, "default"):
            location.check_windowed()
        how = patch.patching.arguments()
        if options.target_length >= stated:  # the longest row, where no target is given
            how["target_length"] = options.target_length
        apply(model, patch.method or "default", **how, replace=patch.replace)
    if not lora.rank:
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(options.train.seed)  # the initial values of the adapters are random
    return get_peft_model(
        model,
        LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha or 2 * lora.rank,
            lora_dropout=lora.dropout,
            target_modules=targets,
            revision=options.model.revision,
            task_type="CAUSAL_LM",
        ),
    )


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
            f"{options.target_length}: give shorter data.length or patch.target_length, or patch.method with "
            "patch.replace=true"
        )


def target_pattern(model: PreTrainedModel, targets: Sequence[str]) -> str:
    """Return the regular expression of the projections that get an adapter, in the layers of the text decoder alone.

    Args:
        model: a causal language model of transformers, without adapters.
        targets: last names of projections such as ``q_proj``, ``"all-linear"`` (attention and MLP) or ``"attention"``.

    Raises:
        ValueError: a name matches no projection.
    """
    # A pattern and not a list of names: PEFT would match a name such as q_proj in a vision tower, too.
    decoder: Any = decoder_path(model)[-1]
    path = next(name for name, module in model.named_modules() if module is decoder)
    linears = [name for name, module in decoder.layers.named_modules() if isinstance(module, nn.Linear)]
    attention = {name.rpartition(".")[2]: None for name in linears if "attn" in name}
    every = {name.rpartition(".")[2]: None for name in linears if "attn" in name or "mlp" in name}
    groups = {ALL_LINEAR: every, "attention": attention}
    names = [name for target in targets for name in groups.get(target, [target])]
    if unknown := [name for name in names if name not in every]:
        raise ValueError(
            f"lora.target_modules: {unknown[0]!r} matches no projection of {type(model).__name__}. "
            f"Known: {', '.join([*groups, *every])}"
        )
    return rf"{re.escape(path)}\.layers\..*\.({'|'.join(map(re.escape, names))})"


def training_plan(options: RecipeOptions) -> Plan:
    """Return the memory plan of one forward and backward pass.

    Raises:
        ValueError: a plan does not cover this kind of model.
    """
    gpus = int(os.environ.get("WORLD_SIZE", 1))
    return plan(
        bundled_folder_or_name(options.model.name),
        length=options.data.length,
        batch=options.train.batch,
        lora_rank=options.lora.rank or None,
        target_modules=options.lora.target_modules,
        quantization=options.model.quantization,
        optimizer=options.train.optimizer.removeprefix("paged_"),
        checkpointing=options.train.checkpointing,
        attention=options.model.attention,
        dtype=options.model.dtype,
        boundaries=options.data.boundaries,
        gpus=gpus,
        # The processes over the readers: how many of them share each row.
        context_parallel=gpus * options.train.batch * options.train.accumulate // rows_per_step(options),
    )
