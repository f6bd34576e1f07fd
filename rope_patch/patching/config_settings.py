"""The rotary settings of a config: read, written into it, and tried in a copy."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

READ_GLOBAL = "allow_global_per_layer_attribute_access"
"""On configs whose head_dim varies by layer (Gemma 4), transformers' own check of the longrope form reads the global
head_dim, which such a config refuses unless it says this. The rotary class itself reads the right one."""

CONFIG_KEYS = ("rope_parameters", "max_position_embeddings", "original_max_position_embeddings", READ_GLOBAL)
"""The keys of a config that a patch may set. The original context is among them because Phi-3 has it as a key of its
own, and Phi-MoE copies it out of ``rope_parameters`` whenever those are checked."""


def _names_in(config: PreTrainedConfig) -> dict[str, str]:
    """Return the keys that a patch may set, each with the name that the config's family has for it."""
    names = {}
    for key in CONFIG_KEYS:
        names[key] = str(config.attribute_map.get(key, key))
    return names


def settings_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Return a copy of the config's rotary settings, and of ``head_dim`` if it is None."""
    names = _names_in(config)
    if config.__dict__.get("head_dim", 0) is None:
        names["head_dim"] = "head_dim"
    settings = {}
    for key, name in names.items():
        if name in config.__dict__:
            settings[key] = copy.deepcopy(config.__dict__[name])
    return settings


def set_rotary_settings(
    config: PreTrainedConfig, settings: Mapping[str, Any], record: Mapping[str, Any] | None
) -> None:
    """Replace the rotary settings and the record of a config.

    Args:
        config: the config that is changed.
        settings: the rotary settings that it will hold, and no others.
        record: the patch record as a dict; None removes it.
    """
    # A key that only the old settings have must not remain.
    for name in (*_names_in(config).values(), "rope_patch"):
        config.__dict__.pop(name, None)
    for key, value in settings.items():
        setattr(config, key, copy.deepcopy(value))
    if record is not None:
        config.rope_patch = copy.deepcopy(record)


def config_with(config: PreTrainedConfig, settings: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the config as transformers would read it from a file with other rotary settings and without a record."""
    names = _names_in(config)
    data = json.loads(config.to_json_string(), object_hook=_infinity)
    for name in (*names.values(), "rope_patch"):
        data.pop(name, None)
    data |= {names.get(key, key): copy.deepcopy(value) for key, value in settings.items()}
    with silent_transformers():
        return type(config).from_dict(data)


def _infinity(value: dict[str, Any]) -> Any:
    """Return the infinity that an object stands for in transformers' JSON; other objects are returned as they are."""
    return float(value["__float__"]) if set(value) == {"__float__"} else value


def encoding_of(config: PreTrainedConfig, layer_type: str | None) -> Mapping[str, Any]:
    """Return the part of ``rope_parameters`` that encodes one table."""
    parameters: Mapping[str, Any] = config.rope_parameters
    return parameters if layer_type is None else parameters[layer_type]


def build_rotary(rotary_class: type[nn.Module], config: PreTrainedConfig) -> nn.Module:
    """Build the model's own rotary class from a config, on the CPU."""
    with torch.device("cpu"), silent_transformers():
        return rotary_class(config)


# transformers calls these two keys of the longrope form unrecognized each time a config is read. vLLM takes the
# attention scaling from them alone, so they are right where they are, and nobody needs the warning.
_OUR_KEYS = re.compile(r"Unrecognized keys in .*: \{'(?:short|long)_mscale', '(?:short|long)_mscale'\}")
_silent = ContextVar("silent", default=False)


def _is_shown(record: logging.LogRecord) -> bool:
    return not (_silent.get() or _OUR_KEYS.fullmatch(record.getMessage()))


_filtered: list[logging.Filterer] = [*logging.getLogger("transformers").handlers]
for _name in ("modeling_rope_utils", "configuration_utils", "modeling_utils"):
    _filtered.append(logging.getLogger(f"transformers.{_name}"))
for _each in _filtered:
    _each.addFilter(_is_shown)


@contextlib.contextmanager
def silent_transformers() -> Iterator[None]:
    """Silence transformers' logging of trial configs and models, in this thread alone."""
    token = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(token)
