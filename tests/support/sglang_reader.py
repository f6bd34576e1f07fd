"""What SGLang does with a config, by reading its source: 0.5.23, ``srt/models`` and ``srt/layers/rotary_embedding``.

There is no package of it for a CPU, so that it cannot be asked. ``make test-engines`` compares the tables that its
Python builds. Families that are not here were not read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rope_patch import frequencies
from rope_patch.engines.asking import AskedLayer, EngineAnswer
from rope_patch.engines.program_contexts import kind_of
from rope_patch.engines.stated_config import FULL, SLIDING, StatedConfig
from rope_patch.methods.llama3 import llama3_table
from rope_patch.methods.longrope import longrope_table
from rope_patch.methods.yarn import yarn_scaling, yarn_table

VERSION = "0.5.23"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text", "phi", "stablelm")
BASE_ONLY = (("gemma", None), ("gemma2", None), ("phi", None), ("stablelm", None), ("gemma3_text", SLIDING))
"""Model types, each with a layer type, on which its code reads nothing but ``rope_theta`` and the rotated share."""
TOP_SHARE = {"llama": 1.0, "mistral": 1.0, "phi3": 1.0, "phi": 0.5, "stablelm": 0.25}
"""Families on which it can rotate a share of a head, which it reads only at the top of config.json; the defaults."""
NO_WINDOW = ("mistral", "phi3", "qwen2", "qwen3")
SHARE = "partial_rotary_factor"


def answer_of(stated: StatedConfig) -> EngineAnswer:
    """Return what SGLang does with a config, as a program that can be asked says it."""
    try:
        tables = {kind: table_of(stated, kind) for kind in stated.tables}
    except ValueError as error:
        return EngineAnswer(VERSION, error=str(error))
    except KeyError as error:
        return EngineAnswer(VERSION, unread=f"it was not read for a config without {error}")
    layers = stated.layers
    # Of Gemma 2 it takes every second layer for full attention, whatever layer_types says.
    if stated.model_type == "gemma2":
        layers = tuple(stated.layer(SLIDING if index % 2 else FULL) for index in range(1, len(layers) + 1))
    windowless = stated.model_type in NO_WINDOW
    answered = [AskedLayer(*tables[layer.kind], None if windowless else layer.window) for layer in layers]
    return EngineAnswer(VERSION, None, tuple(answered))


def table_of(stated: StatedConfig, kind: str | None) -> tuple[Tensor, float]:
    """Return the frequencies and the attention factor of a layer type.

    Raises:
        ValueError: SGLang fails on the config.
        KeyError: a key that its code was not read without.
    """
    parameters = stated.parameters(kind)
    table = stated.tables[kind]
    family = stated.model_type
    if family == "gemma3_text" and kind != SLIDING:  # its model calls transformers' functions, on one dictionary
        return frequencies.zero_unrotated(table.inv_freq), table.attention_scaling
    if {"attn_factor", "extrapolation_factor"} & set(parameters):
        raise KeyError("keys of YaRN that transformers does not know")
    complete = stated.complete
    head_dim = int(complete.get("head_dim") or complete["hidden_size"] // complete["num_attention_heads"])
    share = stated.raw.get(SHARE, TOP_SHARE[family]) if family in TOP_SHARE else 1.0
    dims = int(head_dim * share)
    theta = float(parameters["rope_theta"])
    rope_type = kind_of(parameters)
    if (family, kind) in BASE_ONLY:
        return frequencies.geometric(theta, dims), 1.0
    if rope_type == "proportional":  # every pair is in that table, and the share at the top says how many turn
        inv_freq = frequencies.geometric(theta, head_dim)
        inv_freq[int(head_dim * share) // 2 :] = 0.0
        return inv_freq, 1.0
    return scaled(rope_type, parameters, theta, dims, stated.context)


def scaled(
    rope_type: str, parameters: Mapping[str, Any], theta: float, dims: int, context: int
) -> tuple[Tensor, float]:
    """Return frequencies and attention factor of one dictionary of ``rope_parameters``."""
    original = int(parameters.get("original_max_position_embeddings") or context)
    plain = frequencies.geometric(theta, dims)
    if rope_type == "linear":
        if isinstance(parameters["factor"], int):
            raise ValueError("it fails on a factor of linear that is an integer: write 4.0 and not 4")
        return plain / parameters["factor"], 1.0
    if rope_type == "llama3":
        numbers = {key: parameters[key] for key in ("factor", "low_freq_factor", "high_freq_factor")}
        return llama3_table(plain, context=original, **numbers), 1.0
    if rope_type == "yarn":
        inv_freq = yarn_table(
            theta,
            dims,
            factor=parameters["factor"],
            context=original,
            beta_fast=parameters.get("beta_fast") or 32,
            beta_slow=parameters.get("beta_slow") or 1,
            truncate=bool(parameters.get("truncate", True)),
        )
        # It ignores attention_factor.
        return inv_freq, yarn_scaling(parameters["factor"], parameters.get("mscale"), parameters.get("mscale_all_dim"))
    if rope_type == "longrope":
        if len(parameters["long_factor"]) != dims // 2:
            raise ValueError(f"it rotates {dims // 2} pairs, and fails on {len(parameters['long_factor'])} factors")
        inv_freq = frequencies.zero_unrotated(longrope_table(theta, parameters["long_factor"]))
        if parameters.get("long_mscale") is not None:
            return inv_freq, float(parameters["long_mscale"])
        grown = context / original
        return inv_freq, math.sqrt(1 + math.log(grown) / math.log(original)) if grown > 1 else 1.0
    return plain, 1.0
