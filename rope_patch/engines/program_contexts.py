"""Compute the context that other programs derive from a config: some multiply it, and some leave a part of it out.

*Sources*: vLLM 0.33.0 ``config/model.py``, ``_get_and_verify_max_len``, and
``transformers_utils/model_arch_config_convertor.py``, ``derive_max_model_len_and_key``, for its keys; SGLang 0.5.23
``srt/utils/hf_transformers/common.py``, ``get_context_length``. Each function returns the context that the program
serves by default, and a sentence where that is not the stated one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True)
class StatedContext:
    """The statements of a config about its context.

    Attributes:
        length: the value of ``max_position_embeddings`` [tokens].
        parameters: the dictionaries of ``rope_parameters``: a single one, or one for each layer type.
        nested: whether there is a dictionary for each layer type.
        model_type: the model type of the text decoder.
        original: the value of ``original_max_position_embeddings`` outside ``rope_parameters`` [tokens]; None if it is
            not there.
        others: the values of other keys that an engine takes for the context, from :func:`other_contexts` [tokens].
    """

    length: int
    parameters: tuple[Mapping[str, Any], ...]
    nested: bool = False
    model_type: str = ""
    original: int | None = None
    others: Mapping[str, int] = field(default_factory=dict)


Derived = tuple[int, tuple[str, ...]]


def kind_of(parameters: Mapping[str, Any]) -> str:
    """Return the rope type of a dictionary, which has another key in transformers 4 than in transformers 5."""
    return str(parameters.get("rope_type", parameters.get("type", "default")))


def as_stated(stated: StatedContext) -> Derived:
    """Return the stated context, which transformers and llama.cpp use."""
    return stated.length, ()


def _length_at(key: str, lengths: Mapping[str, int]) -> Derived:
    """Return the context at a key, and a sentence if it is not that of ``max_position_embeddings``."""
    length, maximum = lengths[key], lengths["max_position_embeddings"]
    if length == maximum:
        return length, ()
    return length, (f"it takes {key}, {length} tokens, for the context, not max_position_embeddings",)


def vllm(stated: StatedContext) -> Derived:
    """Return the context of vLLM.

    >>> vllm(StatedContext(1024, ({"rope_type": "default", "factor": 2.0},)))[0]
    2048
    """
    lengths = {"max_position_embeddings": stated.length}
    lengths |= {key: stated.others[key] for key in _VLLM_KEYS if key in stated.others}
    chosen = "model_max_length"
    if not lengths.get(chosen):
        chosen = min(lengths, key=lambda key: lengths[key])
    derived, why = _length_at(chosen, lengths)
    length = float(derived)
    factor = 1.0
    reasons = [*why]
    scaling = stated.parameters
    # vLLM leaves Gemma 3 out, whose stated context is scaled already.
    if "gemma3" in stated.model_type:
        scaling = ()
    for parameters in scaling:
        kind = kind_of(parameters)
        if kind in ("longrope", "llama3", "yarn"):
            continue
        # As in vLLM's loop over layer types, a dictionary without a factor keeps the one before it.
        factor = parameters.get("factor", factor) or 1.0
        if factor != 1.0:
            reasons.append(f"{_MULTIPLIED} {kind}")
    length *= factor
    if stated.original and any(kind_of(parameters) == "longrope" for parameters in stated.parameters):
        if stated.original != int(length):
            reasons.append(
                f"it serves the {stated.original} tokens of original_max_position_embeddings under longrope, unless "
                "--max-model-len says more"
            )
        length = float(stated.original)
    return int(length), tuple(reasons)


def sglang(stated: StatedContext) -> Derived:
    """Return the context of SGLang, which looks for a factor only where all layers share one dictionary."""
    parameters = {} if stated.nested else stated.parameters[0]
    lengths = {"max_position_embeddings": stated.length, **stated.others}
    length, why = _length_at(
        next((key for key in _SGLANG_KEYS if key in stated.others), "max_position_embeddings"), lengths
    )
    factor, kind = parameters.get("factor") or 1.0, kind_of(parameters)
    if factor == 1.0 or kind == "llama3" or "original_max_position_embeddings" in parameters:
        return length, why
    return int(factor * length), (*why, f"{_MULTIPLIED} {kind}")
