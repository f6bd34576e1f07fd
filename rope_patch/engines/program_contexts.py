"""Compute the context that other programs derive from a config: some multiply it, and some leave a part of it out.

*Sources*: vLLM 0.33.0 ``config/model.py``, ``_get_and_verify_max_len``, and
``transformers_utils/model_arch_config_convertor.py``, ``derive_max_model_len_and_key``, for its keys; SGLang 0.5.23
``srt/utils/hf_transformers/common.py``, ``get_context_length``. Each function takes the config of the text decoder and
returns the context that the program serves by default [tokens], and a sentence where that is not the stated one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Derived = tuple[int, tuple[str, ...]]
_MULTIPLIED = "it multiplies the context that the config states by the factor of"

_VLLM_KEYS = (
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
"""Keys that vLLM reads besides ``max_position_embeddings``. ``model_max_length`` is its context if it is there; if not,
it is the smallest of all."""

_SGLANG_KEYS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length")
"""Keys that SGLang reads before ``max_position_embeddings``: the first one that is there is its context."""


def other_contexts(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the keys of a config, beside ``max_position_embeddings``, that an engine takes for the context [tokens].

    >>> other_contexts({"seq_length": 2048, "max_position_embeddings": 4096, "max_seq_len": None})
    {'seq_length': 2048}
    """
    known = dict.fromkeys((*_VLLM_KEYS, *_SGLANG_KEYS))
    # Not isinstance, for which a boolean is an integer, too.
    return {key: config[key] for key in known if type(config.get(key)) is int}


def parameters_in(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the dictionaries of a config's ``rope_parameters``: a single one, or one for each layer type."""
    parameters: Mapping[str, Any] = config["rope_parameters"]
    return [value for value in parameters.values() if isinstance(value, Mapping)] or [parameters]


def kind_of(parameters: Mapping[str, Any]) -> str:
    """Return the rope type of a dictionary, which has another key in transformers 4 than in transformers 5."""
    return str(parameters.get("rope_type", parameters.get("type", "default")))


def served_context(program: str, config: Mapping[str, Any]) -> Derived:
    """Return the context that a program serves by default [tokens], and sentences where it is not the stated one.

    Args:
        program: the program; others than vLLM and SGLang serve what ``max_position_embeddings`` states.
        config: the config of the text decoder, as transformers 5 completes it.
    """
    if program not in ("vllm", "sglang"):
        return config["max_position_embeddings"], ()
    context, reasons = vllm(config) if program == "vllm" else sglang(config)
    for parameters in parameters_in(config):
        if kind_of(parameters) != "yarn":
            continue
        original = parameters.get("original_max_position_embeddings") or config["max_position_embeddings"]
        positions = math.ceil(parameters["factor"] * original)
        if positions < config["max_position_embeddings"]:
            context = min(context, positions)
            held = f"its table holds factor times original_max_position_embeddings, {positions} positions, and no more"
            reasons = (*reasons, held)
    return context, reasons


def _length_at(key: str, config: Mapping[str, Any]) -> Derived:
    """Return the context at a key, and a sentence if it is not that of ``max_position_embeddings``."""
    length = config[key]
    maximum = config["max_position_embeddings"]
    if length == maximum:
        return length, ()
    return length, (f"it takes {key}, {length} tokens, for the context, not max_position_embeddings",)


def vllm(config: Mapping[str, Any]) -> Derived:
    """Return the context of vLLM.

    >>> vllm({"max_position_embeddings": 1024, "rope_parameters": {"rope_type": "default", "factor": 2.0}})[0]
    2048
    """
    others = other_contexts(config)
    chosen = "model_max_length"
    if not others.get(chosen):
        keys = ["max_position_embeddings", *(key for key in _VLLM_KEYS if key in others)]
        chosen = min(keys, key=lambda key: config[key])
    derived, why = _length_at(chosen, config)
    length = float(derived)
    factor = 1.0
    reasons = [*why]
    scaling = parameters_in(config)
    longrope = any(kind_of(parameters) == "longrope" for parameters in scaling)
    # vLLM leaves Gemma 3 out, whose stated context is scaled already.
    if "gemma3" in config.get("model_type", ""):
        scaling = []
    for parameters in scaling:
        kind = kind_of(parameters)
        if kind in ("longrope", "llama3", "yarn"):
            continue
        # As in vLLM's loop over layer types, a dictionary without a factor keeps the one before it.
        factor = parameters.get("factor", factor) or 1.0
        if factor != 1.0:
            reasons.append(f"{_MULTIPLIED} {kind}")
    length *= factor
    original = config.get("original_max_position_embeddings")
    if original and longrope:
        if original != int(length):
            reasons.append(
                f"it serves the {original} tokens of original_max_position_embeddings under longrope, unless "
                "--max-model-len says more"
            )
        length = float(original)
    return int(length), tuple(reasons)


def sglang(config: Mapping[str, Any]) -> Derived:
    """Return the context of SGLang, which looks for a factor only where all layers share one dictionary."""
    parameters = config["rope_parameters"]
    others = other_contexts(config)
    length, why = _length_at(next((key for key in _SGLANG_KEYS if key in others), "max_position_embeddings"), config)
    factor = parameters.get("factor") or 1.0
    kind = kind_of(parameters)
    if factor == 1.0 or kind == "llama3" or "original_max_position_embeddings" in parameters:
        return length, why
    return int(factor * length), (*why, f"{_MULTIPLIED} {kind}")
