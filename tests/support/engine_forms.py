"""Configs of families in the forms in which people write them, by which engines are asked; without weights."""

from __future__ import annotations

import contextlib
import json
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from releases import METHODS as DOUBLING
from releases import RELEASES
from rope_patch.checkpoints.model_without_weights import model_without_weights
from rope_patch.engines.folders import exported_config, read_tables
from rope_patch.engines.stated_config import StatedConfig
from rope_patch.patching.install import apply
from rope_patch.patching.locate import locate
from rope_patch.patching.older_keys import add_older_keys
from rope_patch.patching.verify import inspect_model
from support.engine_folders import LLAMA3

CONTEXT = 4096
TARGET = 16384
LAYERS = 8
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "phi3": {"original_max_position_embeddings": CONTEXT, "sliding_window": None},
    "gemma": {},
    "gemma2": {"sliding_window": 1024},
    "gemma3_text": {"sliding_window": 1024, "num_hidden_layers": 12},
    "gemma4_text": {"sliding_window": 1024, "num_hidden_layers": 12},
    "olmo3": {"sliding_window": 1024},
    "phi": {"hidden_size": 2560},  # as Phi-2: the default rotates 25 features of a head, which is odd
    "stablelm": {},
    "gpt_neox": {},
    "glm": {},
    "glm4": {},
    "glm4_moe": {"head_dim": 128},
    "gpt_oss": {"sliding_window": 128},
    "exaone4": {"sliding_window": 1024},
    "llama4_text": {},
    "cohere": {},
    "cohere2": {"sliding_window": 1024},
    "olmo": {},
    "olmo2": {},
    "olmoe": {},
    "granite": {},
    "granitemoe": {},
    "granitemoehybrid": {"position_embedding_type": "rope", "layer_types": ["attention"] * LAYERS},
    "mixtral": {"sliding_window": None, "head_dim": 128},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "qwen3_next": {},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "smollm3": {},
    "starcoder2": {"sliding_window": None},
    "seed_oss": {},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "ministral": {"sliding_window": 1024, "head_dim": 128},
    "ministral3": {},
    "minimax_m2": {},
    "phimoe": {"sliding_window": None},
    "helium": {},
    "arcee": {},
    "apertus": {},
    "bamba": {"attn_layer_indices": [3, 7]},
    "falcon_h1": {"head_dim": 128},  # published configs state it, and MLX has another default
    "lfm2": {},
    "persimmon": {},
    "nanochat": {},
    "exaone_moe": {"sliding_window": 1024},
    "flex_olmo": {},
    "jais2": {},
    "solar_open": {},
    "vaultgemma": {"sliding_window": 1024},
}
"""Families by model type, with settings beside the defaults of their class."""
BASE = {"rope_theta": 123456.0}
"""A base that no family has by default: what a program does with it, it does with every base."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT}
SCALINGS: dict[str, dict[str, Any]] = {
    "yarn": YARN,
    "yarn with its factor": YARN | {"attention_factor": 1.5},
    "yarn with mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 0.5},
    "yarn of another ramp": YARN | {"beta_fast": 16.0},
    "yarn of another unrounded ramp": YARN | {"truncate": False, "beta_fast": 16.0},
    "yarn unrounded": YARN | {"truncate": False},
    "yarn without its context": {"rope_type": "yarn", "factor": 4.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 1024},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "whole linear": {"rope_type": "linear", "factor": 4},
}
BY_TYPE = {
    "yarn by type": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT},
    "linear by type": {"type": "linear", "factor": 4.0},
    "whole linear by type": {"type": "linear", "factor": 4},
}
"""Scalings as models of 2023 and 2024 state them, Vicuna and the card of Qwen2.5 among them."""
METHODS = (
    "yarn:factor=4",
    "yarn:factor=4:attention_factor=1.5",
    "pi:factor=4",
    "abf:rope_theta=5000000",
    "p_rope:p=0.5",
    "truncated",
    "mrrope:factor=4",
    "llama3:factor=4",
    "longrope:factor=4",
    "nope",
    "partial:p=0.5",
)


def configs_of(family: str, **sizes: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield configs of a family by name: plain ones, scaled ones as people write them, and what we write.

    Args:
        family: the model type.
        **sizes: settings of the model beside those of :data:`FAMILIES`.
    """
    base = plain(family, **sizes)
    yield "plain", base
    written = base.get("rope_parameters") or {}
    nested = any(isinstance(value, dict) for value in written.values())
    own = rewritten(base, BASE, nested)
    yield "another base", own
    for name, scaling in SCALINGS.items():
        yield name, rewritten(base, scaling | BASE, nested)
    for name, scaling in {"plain": {}, **SCALINGS, **BY_TYPE}.items():
        yield f"{name} in the keys of transformers 4", older(own, scaling)
    for name, scaling in {"plain": {}, **BY_TYPE}.items():
        written = older(base, scaling)
        written.pop("rope_theta", None)
        yield f"{name} without a base in the keys of transformers 4", written
    for method in METHODS:
        yield from ours(own, method)
        if "original_max_position_embeddings" in base:  # a program may take another table within it
            yield from ours(own, method, CONTEXT)
    if nested:
        for method in METHODS:
            for name, config in ours(base, method):
                yield f"{name}, usual base", config
        equal = own | {"rope_parameters": {kind: table | BASE for kind, table in own["rope_parameters"].items()}}
        for method in METHODS:  # of one base, as OLMo 3 is published
            for name, config in ours(equal, method):
                yield f"{name}, one base", config
        for name, tables in (("", own), (", one base", equal)):
            parameters = {kind: table | YARN for kind, table in tables["rope_parameters"].items()}
            yield f"yarn in all layers{name}", own | {"rope_parameters": parameters, "max_position_embeddings": TARGET}
        for method in ("yarn:factor=4", "pi:factor=4", "mrrope:factor=4"):
            for name, config in ours(own, method, layer_types=[*written]):
                yield f"{name} in all layers", config
        for name, config in ours(own, "pi:factor=4", layer_types=[kind for kind in written if "sliding" in kind]):
            yield f"{name} in sliding layers", config
    if nested:
        yield "yarn in the keys of transformers 4, over the usual base", older(base, YARN)
    # Other layers in the keys of both, since which layers a program takes is seen where it builds the right tables.
    for label, source in (("", base), (" in the keys of transformers 4", older(base, {}))):
        for name, config in other_layers(family, source):
            yield f"{name}{label}", config
    yield from released(family, **sizes)


def released(family: str, **sizes: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the configs of releases of a family, and what doubles their context."""
    for release in RELEASES:
        if release.model_type in (family, family.removesuffix("_text")):
            tables: Any = dict(release.rope_parameters)
            # The layers are those of the family, in whose number the small models of llama.cpp's converter are built.
            more = {
                key: value for key, value in release.more.items() if key not in ("num_hidden_layers", "layer_types")
            }
            own = plain(family, **sizes, **more)
            own |= {"max_position_embeddings": release.context, "rope_parameters": tables}
            yield release.name, own
            method = DOUBLING.get(release.scaled["rope_type"], "yarn")
            yield from ours(own, method.replace(" ", ":"), 2 * release.context)


def other_layers(family: str, base: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield configs with windows in other layers than the family's usual ones."""
    kinds = base.get("layer_types")
    if kinds and len(set(kinds)) > 1:
        yield "other layers", base | {"layer_types": [*kinds[1:], kinds[0]]}
        second = {"layer_types": [*sorted(set(kinds), reverse=True)] * (len(kinds) // 2)}
        yield "every second layer", base | second
        yield "every second layer, said as MLX reads it", base | second | {"sliding_window_pattern": 2}
    if family in ("mistral", "phi3", "mixtral", "starcoder2", "phimoe"):
        yield "window of all layers", base | {"sliding_window": 1024}
    if family in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"):
        some = {"sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 2}
        yield "window of some layers", {key: value for key, value in base.items() if key != "layer_types"} | some


def plain(family: str, **sizes: Any) -> dict[str, Any]:
    """Return the config of a family by its class's defaults, with few layers and a short context."""
    settings = {"num_hidden_layers": LAYERS, "max_position_embeddings": CONTEXT} | FAMILIES[family] | sizes
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        AutoConfig.for_model(family, **settings).save_pretrained(folder)
        written: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    names = {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]}
    # What a config leaves unset is not written by most, and some classes fail on a null.
    return {key: value for key, value in written.items() if value is not None or key == "sliding_window"} | names


def rewritten(base: dict[str, Any], change: dict[str, Any], nested: bool) -> dict[str, Any]:
    """Return a config with other parameters of its table, that of full attention where there are several."""
    parameters = base["rope_parameters"]
    if nested:
        changed = parameters | {"full_attention": unscaled(parameters["full_attention"]) | change}
    else:
        changed = unscaled(parameters) | change
    longer = {"max_position_embeddings": TARGET} if "rope_type" in change else {}
    return base | {"rope_parameters": changed} | longer


def unscaled(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a plain table with the base and the share of another one."""
    kept = ["rope_theta", "partial_rotary_factor"]
    if "llama_4_scaling_beta" in parameters:  # Ministral 3 scales queries by it, and by the context before scaling
        kept += ["llama_4_scaling_beta", "original_max_position_embeddings"]
    return {"rope_type": "default", **{key: parameters[key] for key in kept if key in parameters}}


def older(base: dict[str, Any], scaling: dict[str, Any]) -> dict[str, Any]:
    """Return a config in the keys of transformers 4, as most checkpoints on the hub have it."""
    parameters = base["rope_parameters"]
    full = parameters.get("full_attention", parameters)
    kept = {key: value for key, value in base.items() if key != "rope_parameters"}
    top: dict[str, Any] = {"rope_theta": full["rope_theta"], "rope_scaling": scaling or None}
    if "partial_rotary_factor" in full:
        top["partial_rotary_factor"] = full["partial_rotary_factor"]
    if base["model_type"] == "gemma3_text":
        top["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
    if base["model_type"] == "gpt_neox":
        top["rotary_emb_base"] = top.pop("rope_theta")
        top["rotary_pct"] = top.pop("partial_rotary_factor")
    if scaling:
        top["max_position_embeddings"] = TARGET
    return kept | top


def ours(
    base: dict[str, Any], method: str, target_length: int = TARGET, **options: Any
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what ``apply`` and ``export`` write of a config under a method that takes it."""
    with tempfile.TemporaryDirectory() as root, contextlib.suppress(ValueError, NotImplementedError):
        folder = Path(root)
        (folder / "config.json").write_text(json.dumps(base))
        model = model_without_weights(folder)
        apply(model, method, target_length=target_length, **options)
        model.config.save_pretrained(folder)
        add_older_keys(folder)
        yield method, json.loads((folder / "config.json").read_text())
        tables = read_tables(model)
        for engine in ("hf", "vllm"):
            with contextlib.suppress(ValueError):
                yield f"{method}, exported for {engine}", exported_config(model, tables, engine)[0]


def stated_of(config: dict[str, Any]) -> StatedConfig:
    """Return a config as programs find it, with the tables of transformers 5."""
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / "config.json").write_text(json.dumps(config))
        model = model_without_weights(root, checked=False)
        return StatedConfig.of(locate(model).config, config, inspect_model(model).tables)
