"""Spell the rotary part of a config.json so that transformers 5 and 4 and other engines read one and the same table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rope_patch import frequencies
from rope_patch.methods import longrope_parameters
from rope_patch.patching.base_tables import READ_GLOBAL, base_of, config_with, original_rotary, scaling_of, settings_of
from rope_patch.patching.locate import RotaryLocation, original_tables
from rope_patch.tables import RotaryTable

_SHARE = "partial_rotary_factor"
_OWN_KEYS = ("attention_factor", "mscale", "mscale_all_dim")


def spelling(slot: RotaryTable, model_type: str, *, everywhere: bool) -> dict[str, Any]:
    """Return ``rope_parameters`` that transformers 4 and 5 read as a table; with ``everywhere`` vLLM and SGLang too.

    ``proportional``, which transformers 4 does not know, is written in the longrope form; but on Gemma 4, whose stock
    type it is and which version 4 does not know either. For other engines more is, since they read it otherwise: they
    multiply the context by the factor of ``linear``; SGLang ignores the ``attention_factor`` of ``yarn`` and, but for
    Gemma 4, the share of ``proportional``, which vLLM refuses at 0; and a longrope table must state one context, lest
    they switch, and its scaling as ``short_mscale`` and ``long_mscale``, lest they make up one of their own.
    """
    spelled = dict(slot.rope_parameters or {})
    kind = spelled.get("rope_type", "default") if slot.rope_parameters else None
    if kind in ("default", "llama3") or (kind in ("linear", "yarn", "longrope") and not everywhere):
        return spelled
    if kind == "yarn" and not any(key in spelled for key in _OWN_KEYS):
        covered = spelled["factor"] * spelled.get("original_max_position_embeddings", 0)
        if covered >= slot.max_position_embeddings:  # as many positions as vLLM and SGLang compute
            return spelled
    plain = spelled.get(_SHARE, 1.0) > 0 and spelled.get("factor", 1.0) == 1.0
    if kind == "proportional" and model_type == "gemma4_text" and plain:
        return spelled
    factors = frequencies.longrope_factors(slot.inv_freq, slot.rope_theta)
    form = longrope_parameters(factors, slot, attention_scaling=slot.attention_scaling)
    mscale = {"short_mscale": slot.attention_scaling, "long_mscale": slot.attention_scaling}
    return {**slot.other_keys, **form, **mscale}


def config_keys(site: RotaryLocation, slots: Sequence[RotaryTable], *, everywhere: bool) -> dict[str, Any]:
    """Return the config keys that spell all tables of a model, checked against its own stock rotary class.

    Args:
        site: where the model keeps them.
        slots: the tables.
        everywhere: spell them for other engines too, as :func:`spelling` does.

    Raises:
        ValueError: the class does not build the tables from it.
    """
    kind = str(site.config.model_type)
    spelled = {
        slot.layer_type: _without_ignored_factor(site, slot, spelling(slot, kind, everywhere=everywhere))
        for slot in slots
    }
    parameters: dict[Any, Any] = dict(spelled) if None not in spelled else spelled[None]
    settings = settings_of(site.config) | {"rope_parameters": parameters}
    if getattr(site.config, "is_heterogeneous", False) and any(s["rope_type"] == "longrope" for s in spelled.values()):
        settings[READ_GLOBAL] = True
    module, _ = base_of(site)
    rebuilt = original_rotary(type(module), config_with(site.config, settings))
    for slot in slots:
        if not builds(rebuilt, slot):
            raise ValueError(f"{type(site.model).__name__} does not build the table of {slot} from {parameters}")
    return settings


def _without_ignored_factor(site: RotaryLocation, slot: RotaryTable, spelled: dict[str, Any]) -> dict[str, Any]:
    """Leave out a ``partial_rotary_factor`` that transformers ignores on this family (Llama): vLLM would obey it."""
    factor = spelled.get(_SHARE)
    if factor is None or slot.layer_type is not None or spelled.get("rope_type") == "proportional":
        return spelled
    head_dim = getattr(site.config, "head_dim", None) or site.config.hidden_size // site.config.num_attention_heads
    if int(head_dim * factor) == slot.rotary_dim:
        return spelled
    return {key: value for key, value in spelled.items() if key != _SHARE}


def builds(rotary: nn.Module, slot: RotaryTable) -> bool:
    """Tell whether a stock rotary module holds a slot's table, up to the last bit of float32."""
    built = frequencies.zero_unrotated(original_tables(rotary)[slot.layer_type].float().cpu())
    return (
        built.shape == slot.inv_freq.shape
        and torch.allclose(built, slot.inv_freq, rtol=3e-7, atol=0.0)
        and abs(scaling_of(rotary, slot.layer_type) - slot.attention_scaling) < 1e-6
    )


def with_context(slots: Sequence[RotaryTable], length: int) -> tuple[RotaryTable, ...]:
    """Return the slots as they read in a config that states a context of ``length`` tokens."""
    return tuple(replace(slot, max_position_embeddings=length) for slot in slots)
