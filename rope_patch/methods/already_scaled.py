"""Tables that a checkpoint scales already: the context that they reach, and what they were before the scaling."""

from __future__ import annotations

import torch

from rope_patch.frequencies import geometric, unrotated, zero_unrotated
from rope_patch.tables import RotaryTable

ORIGINAL = "original_max_position_embeddings"


def own_factor(table: RotaryTable) -> float:
    """Return the factor of a table as transformers reads it: where none is stated, the ratio of the two contexts."""
    return float((table.rope_parameters or {}).get("factor") or table.max_position_embeddings / table.context)


def context_reached(table: RotaryTable) -> int:
    """Return the context that a checkpoint reaches with its table [tokens].

    It is the stated one, or the factor times the original one if that is more: the cards of Qwen add YaRN to a config
    and leave its context as it was, and a context is lowered to save memory.
    """
    stated = table.max_position_embeddings
    original = (table.rope_parameters or {}).get(ORIGINAL)
    # Transformers reads the original context of neither type.
    if not original or table.rope_type in ("default", "dynamic"):
        return stated
    reached = round(own_factor(table) * float(original))
    # Meta trained Llama 3.2 at half of what its factor reaches, and the config says so.
    if table.rope_type == "llama3" and original < stated and reached <= 2 * stated:
        return stated
    return max(stated, reached)


def context_before(table: RotaryTable, given: int | None) -> int:
    """Return the context before the scaling of a table [tokens].

    Args:
        table: a table of the checkpoint, as it was found.
        given: the context that the user gives [tokens]; None if none is given.

    Raises:
        ValueError: the checkpoint does not say it, or says another than the user.
    """
    stated = table.rope_parameters or {}
    original = table.original_max_position_embeddings or stated.get(ORIGINAL)
    if given not in (None, original) and (original or given > table.max_position_embeddings):
        known = f"states a context of {table.max_position_embeddings}"
        if original:
            known = f"states {original}: leave it out"
        raise ValueError(f"{ORIGINAL}={given} is not the context before the scaling of {table.path}, which {known}")
    if given is not None:
        return given
    if original is not None:
        return int(original)
    factor = own_factor(table)
    context = table.max_position_embeddings
    if table.rope_type in ("linear", "yarn", "proportional") and factor != 1.0:
        raise ValueError(
            f"{table.path} is scaled (rope_type {table.rope_type!r}, factor {factor:g}), and nothing says what its "
            f"context was before: {round(context / factor)} tokens if the stated {context} already include the "
            f"factor, {context} if they do not. Give {ORIGINAL}= (yarn, mrrope, llama3), or take pi or abf"
        )
    return context


def is_known(table: RotaryTable) -> bool:
    """Tell whether it is known what the table was before its scaling, or which pairs of a plain table do not rotate."""
    if table.rope_type in ("linear", "llama3", "yarn", "proportional"):
        return True
    # The type longrope is written for any table, too, with equal contexts.
    if table.rope_type == "longrope" and table.context < context_reached(table):
        return True
    plain = zero_unrotated(geometric(table.rope_theta, table.rotary_dim))
    turning = ~unrotated(table.inv_freq)
    return table.attention_scaling == 1.0 and torch.allclose(table.inv_freq[turning], plain[turning], rtol=1e-6, atol=0)


def stopped_as(table: RotaryTable, new: RotaryTable) -> RotaryTable:
    """Return a new table in which the pairs that a checkpoint does not rotate stay unrotated."""
    still = unrotated(table.inv_freq)
    if not bool((still & ~unrotated(new.inv_freq)).any()):
        return new
    return new.becomes(new.inv_freq.masked_fill(still, 0))
