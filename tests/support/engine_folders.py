"""Checkpoint folders that real engines read: every family under methods, and configs as others write them.

All weights are small. Those of random models have queries and keys so large that another table moves log-probabilities:
an engine that reads a table otherwise than it is said to shows it.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch.checkpoints.folder_patch import patch_folder
from rope_patch.engines import export
from rope_patch.methods import MethodLike, as_method
from rope_patch.methods.table import Table
from rope_patch.patching.verify import inspect_model
from support.patches import lora
from support.prompting import ENGLISH

ASSETS = rope_patch.data_path("assets")
CONTEXT = 256
TARGET = 1024
PROMPT = 400
SIZE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,  # Gemma's factor of embeddings, its root, is rounded to bfloat16 in MLX
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {"head_dim": 32, "query_pre_attn_scalar": 32}
SIX_LAYERS = {"num_hidden_layers": 6, "sliding_window": 64, "layer_types": None}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "phi3": {"original_max_position_embeddings": CONTEXT, "sliding_window": None},
    "gemma": {"head_dim": 32},
    "gemma2": {**HEADS, "sliding_window": 64},
    "gemma3_text": {**HEADS, **SIX_LAYERS},
    "gemma4_text": {
        **SIX_LAYERS,
        "head_dim": 32,
        "global_head_dim": 512,  # transformers 5.23 writes it as MLX does not read it
        "vocab_size_per_layer_input": 1024,
        "hidden_size_per_layer_input": 32,
    },
    "olmo3": {**SIX_LAYERS, "num_hidden_layers": 4},
    "phi": {},
    "stablelm": {},
    "gpt_neox": {"intermediate_size": 1024},  # MLX takes four times the hidden size
}
METHODS = (
    "default",
    "yarn:factor=4",
    "p_rope:p=0.5",
    "learned",
    "pi:factor=4",
    "abf:rope_theta=500000",
    "yarn:factor=4:attention_factor=1.5",
    "truncated:context=256",
    "mrrope:factor=4",
    "llama3:factor=4",
    "longrope:factor=4",
    "ntk:factor=4",
    "nope",
    "yarn:factor=3",
    "partial:p=0.5",
    "p_rope_reversed:p=0.5",
    "yarn:factor=4+p_rope:p=0.5",
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def prompt() -> list[int]:
    """Return token ids of a text."""
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "llama", model_max_length=1 << 30)
    return list(tokenizer(ENGLISH).input_ids[:PROMPT])


def checkpoint(family: str, folder: Path, **changes: Any) -> Path:
    """Save a random checkpoint whose log-probabilities another table moves by more than 0.1."""
    torch.manual_seed(0)
    sizes = SIZE | FAMILIES[family] | changes
    if family == "gpt_neox":
        del sizes["num_key_value_heads"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).eval()
    ids = torch.tensor([prompt()[:CONTEXT]])
    for _ in range(12):
        with torch.no_grad():
            before = model(ids).logits.log_softmax(-1)
            with rope_patch.patched(model, "abf:rope_theta=30000"):
                moved = (model(ids).logits.log_softmax(-1) - before).abs()
        if float(moved.max()) > 0.1:
            break
        for name, module in model.named_modules():
            if name.endswith(("q_proj", "k_proj", "qkv_proj", "query_key_value", "q_norm", "k_norm")):
                module.weight.data *= 1.5
    model.save_pretrained(folder)
    shutil.copy(ASSETS / "gemma3" / "tokenizer.json", folder)  # llama.cpp's converter counts its tokens
    return folder


def method_of(name: str, base: Path) -> MethodLike:
    """Return a method; "learned" is a table that no formula gives, with an attention factor of its own."""
    if name == "learned":
        with torch.device("meta"):
            table = inspect_model(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))).tables[0]
        rough = [f * (1 + 0.2 * math.sin(3 * i)) for i, f in enumerate(table.inv_freq.tolist())]
        return Table(values=tuple(rough), attention_scaling=1.07)
    return as_method(name)


def under_methods(name: str, base: Path, methods: tuple[str, ...] = METHODS[:4]) -> Iterator[Path]:
    """Patch a folder with every method that takes it, and yield the folders."""
    for method in methods:
        out = base.with_name(f"{name} {method}")
        try:
            patch_folder(base, method_of(method, base), out, target_length=TARGET)
            yield out
            if method.startswith("p_rope:"):
                out = base.with_name(f"{name} {method} export")
                export(base, out, to="vllm", method=method_of(method, base), target_length=TARGET)
                yield out
        except ValueError:  # the method refuses this checkpoint
            continue


def toys(root: Path) -> Iterator[Path]:
    """Write the bundled checkpoints under every method, two scaled ones under some, and an adapter of each kind."""
    for name in ("llama", "gemma3"):
        base = root / f"toy-{name} base"
        shutil.copytree(ASSETS / name, base)
        yield base
        yield from under_methods(f"toy-{name}", base, METHODS)
    for name, scaling in {
        "llama3": LLAMA3 | {"original_max_position_embeddings": 128},
        "yarn": YARN | {"factor": 2.0},
    }.items():
        base = changed(f"{name}-scaled base", root / "toy-llama base", partial(newer, scaling, False))
        yield base
        yield from under_methods(f"{name}-scaled", base, (f"{name}:factor=2", "p_rope:p=0.5"))
    model = lora(rope_patch.load(ASSETS / "llama", "yarn:factor=4", target_length=TARGET))
    rope_patch.save(model, root / "adapter")
    export(ASSETS / "llama", root / "adapter base", to="vllm", method="yarn:factor=4", target_length=TARGET)
    export(root / "adapter", root / "adapter merged", to="vllm", dtype="float32")  # bfloat16 would round what is merged
    yield root / "adapter merged"


def random_folders(root: Path) -> Iterator[Path]:
    """Write random checkpoints of all families, under some methods and with configs as others write them."""
    for family in FAMILIES:
        base = checkpoint(family, root / f"{family} base")
        yield base
        yield from under_methods(family, base)
        for name, change in changes(family).items():
            yield changed(f"{family} {name}", base, change)


Change = Callable[[dict[str, Any]], dict[str, Any]]


def changes(family: str) -> dict[str, Change]:
    """Return functions by name that change a config to what others write."""
    lists = [2.0] * (16 // {"phi": 2, "stablelm": 4, "gpt_neox": 4}.get(family, 1))
    kinds = {
        "yarn": YARN,
        "yarn-factor": YARN | {"attention_factor": 1.5},
        "yarn-mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 0.5},
        "yarn-attn": YARN | {"attn_factor": 1.25},
        "yarn-ramp": YARN | {"truncate": False, "beta_fast": 16.0},
        "yarn-half": YARN | {"extrapolation_factor": 0.5},
        "yarn-short": YARN | {"factor": 2.0},
        "yarn-unset": {"rope_type": "yarn", "factor": 3.7},
        "yarn-two-names": YARN | {"type": "linear"},
        "longrope": {"rope_type": "longrope", "short_factor": lists, "long_factor": lists},
        "leftover": {"rope_type": "default", "factor": 2.0},
        "llama3-unset": LLAMA3,
        "llama3": LLAMA3 | {"original_max_position_embeddings": 128},
        "linear": {"rope_type": "linear", "factor": 2.0},
        "linear-whole": {"rope_type": "linear", "factor": 5},
        "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    }
    nested = family in ("gemma3_text", "olmo3")
    configs: dict[str, Change] = {}
    for name, scaling in kinds.items() if family != "gemma4_text" else ():
        configs[f"{name}-5"] = partial(newer, scaling, nested)
        if name != "proportional":
            configs[f"{name}-4"] = partial(older, scaling, {})
    if family in ("phi", "stablelm"):
        configs["share-5"] = partial(newer, {"partial_rotary_factor": 0.75}, False)
    if family in ("mistral", "phi3", "qwen2", "qwen3"):
        configs["window"] = partial(
            windowed, {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}
        )
    if family in ("gemma2", "gemma3_text", "olmo3", "gemma4_text"):
        kept = ["sliding_attention", "full_attention", "full_attention"] * 2
        configs["other-layers"] = lambda config: config | {"layer_types": kept[: config["num_hidden_layers"]]}
    if family == "olmo3":  # one base for all layers, as in the published config.json
        configs["one-for-all-5"] = lambda config: config | {"rope_parameters": YARN | {"rope_theta": 50000.0}}
    if family in ("llama", "qwen2"):
        lengths = {"seq_length": 768, "model_max_length": 1280}
        configs["lengths-4"] = partial(older, YARN, {"seq_length": 768})
        configs["lengths-linear-4"] = partial(older, kinds["linear"], lengths)
    return configs


def newer(scaling: dict[str, Any], nested: bool, config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with a scaling in the keys of transformers 5."""
    parameters = config["rope_parameters"]
    if nested:
        scaling = {"full_attention": parameters["full_attention"] | scaling}
    return config | {"rope_parameters": parameters | scaling, "max_position_embeddings": TARGET}


def older(scaling: dict[str, Any], others: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with a scaling in the keys of transformers 4."""
    kept = {key: value for key, value in config.items() if key != "rope_parameters"}
    return kept | {"rope_theta": 50000.0, "rope_scaling": scaling, "max_position_embeddings": TARGET, **others}


def windowed(window: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with a sliding window: in every layer, or on Qwen in those from the second on."""
    return {key: value for key, value in config.items() if key != "layer_types"} | window


def changed(name: str, base: Path, change: Change) -> Path:
    """Copy a folder with another config.json."""
    out = base.with_name(name)
    shutil.copytree(base, out, copy_function=lambda source, target: Path(target).hardlink_to(source))
    (out / "config.json").unlink()
    (out / "config.json").write_text(json.dumps(change(json.loads((base / "config.json").read_text()))))
    return out
