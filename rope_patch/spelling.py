"""Spell tables in a config so that a stock loader rebuilds them, to the last bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rope_patch import frequencies
from rope_patch.methods import longrope_spelling
from rope_patch.rotary import RotarySlot
from rope_patch.sites import (
    READ_GLOBAL,
    RotarySite,
    Slots,
    base_of,
    config_with,
    is_dynamic,
    scaling_of,
    settings_of,
    spelled_for,
    stock_rotary,
    stock_tables,
)


def spell(site: RotarySite, before: Slots, after: Slots, length: int) -> tuple[Slots, dict[str, Any]]:
    """Find config settings from which the model's stock rotary class rebuilds every table, to the last bit.

    The native spelling of each slot is tried first, then the longrope form; what counts is what the stock class makes
    of the config after a round trip through JSON. Tables whose last bits no factor reaches are canonicalised.

    Args:
        site: the model's rotary site.
        before: the base tables, as :func:`~rope_patch.sites.read_slots` read them.
        after: the wanted tables; those that are the very slot of ``before`` keep their spelling.
        length: the context the config will state [tokens].

    Returns:
        The slots with their final tables, and the config keys to set.

    Raises:
        ValueError: no stock config gives the table.
    """
    module, config = base_of(site)
    settings = settings_of(config) | {"max_position_embeddings": length}
    ways: list[dict[str, Any]] = [{}]
    if getattr(config, "is_heterogeneous", False):
        ways.append({READ_GLOBAL: True})
    final: Slots = {}
    reason = "the table it rebuilds is another"
    for kind, slot in after.items():
        if slot is before[kind] and slot.rope_parameters is not None and not is_dynamic(spelled_for(config, kind)):
            final[kind] = slot
            continue
        for way, candidate in itertools.product(ways, _spellings(replace(slot, max_position_embeddings=length))):
            parameters = dict(candidate.rope_parameters or {})
            if kind is not None:
                parameters = {**settings["rope_parameters"], kind: parameters}
            trial = settings | way | {"rope_parameters": parameters}
            try:
                rebuilt = stock_rotary(type(module), config_with(config, trial))
            except Exception as error:  # a family refuses a type in its own way: Phi3 takes longrope only
                reason = f"{type(error).__name__}: {error}"
                continue
            if _same_table(rebuilt, candidate):
                final[kind], settings = candidate, trial
                break
        else:
            raise ValueError(
                f"{type(site.model).__name__} cannot express this table in a config that plain transformers reads; "
                f"nothing was changed. The last spelling failed with {reason}"
            )
    return final, settings


def _spellings(slot: RotarySlot) -> Iterator[RotarySlot]:
    if slot.rope_parameters is not None:
        yield slot
        if slot.other_keys:  # a partial factor the family ignores must not be read by the native type
            yield replace(
                slot,
                rope_parameters={k: v for k, v in slot.rope_parameters.items() if k not in slot.other_keys},
            )
    factors = frequencies.longrope_factors(slot.inv_freq, slot.rope_theta)
    form = longrope_spelling(factors, slot, attention_scaling=slot.attention_scaling)
    table = frequencies.settle(frequencies.longrope(slot.rope_theta, factors))
    for own in (slot.other_keys, {}):
        yield replace(slot, inv_freq=table, rope_type="longrope", rope_parameters={**own, **form})


def _same_table(stock: nn.Module, slot: RotarySlot) -> bool:
    built = stock_tables(stock)[slot.layer_type]
    return (
        built.shape == slot.inv_freq.shape
        and torch.equal(frequencies.settle(built), slot.inv_freq)
        and scaling_of(stock, slot.layer_type) == slot.attention_scaling
    )
