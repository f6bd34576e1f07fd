"""Tables that a checkpoint scales already: the same type with other parameters, and the context before the scaling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rope_patch import frequencies
from rope_patch.tables import RotaryTable

ORIGINAL = "original_max_position_embeddings"


def restated(table: RotaryTable, **changes: Any) -> RotaryTable | None:
    """Return the table that the checkpoint's own type gives with some of its parameters changed.

    Args:
        table: a table of the checkpoint, as it was found.
        **changes: the parameters of its ``rope_parameters`` that change, ``factor`` or ``rope_theta`` among them.

    Returns:
        The table, with every other key as the checkpoint states it; None if the type is not known, or if the model's
        class computes its table in a way of its own.
    """
    # A stated context that grows must not become the context before the scaling.
    stated = dict(table.rope_parameters or {})
    if table.rope_type in ("llama3", "yarn"):
        stated.setdefault(ORIGINAL, table.context)
    found = _computed(table, stated)
    if found is None or not torch.allclose(found, table.inv_freq, rtol=1e-6, atol=0.0):
        return None
    new = {**stated, **changes}
    inv_freq = _computed(table, new)
    assert inv_freq is not None
    scaling = table.attention_scaling
    if table.rope_type == "yarn":
        given = new.get("attention_factor")
        if given is not None:
            scaling = float(given)
        else:
            scaling = frequencies.yarn_scaling(new["factor"], new.get("mscale"), new.get("mscale_all_dim"))
    return table.becomes(inv_freq, rope_parameters=new, attention_scaling=scaling)


def raised(table: RotaryTable, times: float, **changes: Any) -> RotaryTable | None:
    """Return the table of the checkpoint's own type with a factor so many times as large, as :func:`restated` does.

    An ``attention_factor`` that is what the factor implies follows it; any other is a setting, and is kept.
    """
    stated = table.rope_parameters or {}
    factor = float(stated.get("factor") or 1.0)
    attention = stated.get("attention_factor")
    implied = attention is not None and math.isclose(attention, frequencies.yarn_scaling(factor), rel_tol=1e-6)
    if table.rope_type == "yarn" and implied:
        changes.setdefault("attention_factor", frequencies.yarn_scaling(factor * times))
    return restated(table, factor=factor * times, **changes)


def context_reached(table: RotaryTable) -> int:
    """Return the context that a checkpoint reaches with its table [tokens]: the stated one.

    The cards of Qwen add YaRN to a config and leave its context as it was: its factor then says how far it reaches.
    """
    stated: Mapping[str, Any] = table.rope_parameters or {}
    if table.rope_type != "yarn" or not stated.get("factor"):
        return table.max_position_embeddings
    reached = round(float(stated["factor"]) * float(stated.get(ORIGINAL, table.context)))
    return max(table.max_position_embeddings, reached)


def context_before(table: RotaryTable, given: int | None) -> int:
    """Return the context before the scaling of a table [tokens].

    Args:
        table: a table of the checkpoint, as it was found.
        given: the context that the user gives [tokens]; None if none is given.

    Raises:
        ValueError: the checkpoint does not say it, or says another than the user.
    """
    stated: Mapping[str, Any] = table.rope_parameters or {}
    original = table.original_max_position_embeddings or stated.get(ORIGINAL)
    if given is not None and (given > table.max_position_embeddings or original not in (None, given)):
        known = f"states a context of {table.max_position_embeddings}"
        if original:
            known = f"states {original}: leave it out"
        raise ValueError(f"{ORIGINAL}={given} is not the context before the scaling of {table.path}, which {known}")
    if given is not None:
        return given
    if original is not None:
        return int(original)
    factor = float(stated.get("factor") or 1.0)
    context = table.max_position_embeddings
    if table.rope_type in ("linear", "yarn", "proportional") and factor != 1.0:
        raise ValueError(
            f"{table.path} is scaled (rope_type {table.rope_type!r}, factor {factor:g}), and nothing says what its "
            f"context was before: {round(context / factor)} tokens if the stated {context} hold the factor, {context} "
            f"if they do not. Give {ORIGINAL}= (yarn, mrrope, llama3), or take pi or abf"
        )
    return context


def is_known(table: RotaryTable) -> bool:
    """Tell whether it is known what the table was before its scaling, or which pairs of a plain table do not rotate."""
    if table.rope_type in ("linear", "llama3", "yarn", "proportional"):
        return True
    if table.rope_type == "longrope":  # written for any table, too, with equal contexts
        return (table.original_max_position_embeddings or 0) < table.max_position_embeddings
    plain = frequencies.zero_unrotated(frequencies.geometric(table.rope_theta, table.rotary_dim))
    turning = ~frequencies.unrotated(table.inv_freq)
    return table.attention_scaling == 1.0 and torch.allclose(table.inv_freq[turning], plain[turning], rtol=1e-6, atol=0)


def stopped_as(table: RotaryTable, new: RotaryTable) -> RotaryTable:
    """Return a new table in which the pairs that a checkpoint does not rotate stay unrotated."""
    still = frequencies.unrotated(table.inv_freq)
    if not bool((still & ~frequencies.unrotated(new.inv_freq)).any()):
        return new
    return new.becomes(new.inv_freq.masked_fill(still, 0))


def _computed(table: RotaryTable, parameters: Mapping[str, Any]) -> Tensor | None:
    """Return the frequencies that transformers computes from the parameters of a type; None for other types."""
    theta, width = float(parameters.get("rope_theta", 0.0)), table.rotary_dim
    factor = float(parameters.get("factor") or 1.0)
    match table.rope_type:
        case "linear":
            return frequencies.geometric(theta, width) / factor
        case "llama3":
            return frequencies.llama3(
                frequencies.geometric(theta, width),
                factor=factor,
                low_freq_factor=parameters["low_freq_factor"],
                high_freq_factor=parameters["high_freq_factor"],
                context=parameters[ORIGINAL],
            )
        case "yarn":
            return frequencies.yarn(
                theta,
                width,
                factor=factor,
                context=parameters[ORIGINAL],
                beta_fast=parameters.get("beta_fast") or 32,
                beta_slow=parameters.get("beta_slow") or 1,
                truncate=bool(parameters.get("truncate", True)),
            )
        case "proportional":
            turning = int((~frequencies.unrotated(table.inv_freq)).sum())
            inv_freq = torch.zeros_like(table.inv_freq)
            inv_freq[:turning] = frequencies.geometric(theta, width, turning) / factor
            return inv_freq
    return None
