"""Tables that change with the length, taken as they are at one length."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rope_patch import frequencies
from rope_patch.methods import longrope_parameters
from rope_patch.patching.record import silent_transformers
from rope_patch.tables import RotaryTable


def table_at_length(table: RotaryTable, config: PreTrainedConfig, length: int) -> RotaryTable:
    """Return the table that a dynamic type uses at ``length`` tokens.

    Args:
        table: the table that changes with the length.
        config: the config from which transformers builds it.
        length: the length at which it is taken [tokens].

    Raises:
        ValueError: ``length`` is below 1, or the model builds its table in a way of its own.
    """
    if length < 1:
        raise ValueError(f"freeze_at must be >= 1 token, got {length}")
    with torch.device("cpu"), silent_transformers():
        build = ROPE_INIT_FUNCTIONS[table.rope_type]
        now, _ = build(config, seq_len=1, layer_type=table.layer_type)
        inv_freq, scaling = build(config, seq_len=length, layer_type=table.layer_type)
    # Some families have a function of their own under the same type: transformers' would give another table.
    if not torch.equal(frequencies.zero_unrotated(now), table.inv_freq):
        raise ValueError(f"{table.name} builds its {table.rope_type} table in a way of its own: it cannot be frozen")
    encoding = table.rope_parameters or {}
    if table.rope_type == "longrope":
        factors = encoding["long_factor" if length > table.context else "short_factor"]
        native = longrope_parameters(factors, table, attention_scaling=scaling)
    else:
        # The base of transformers' _compute_dynamic_ntk_parameters, from which "default" builds the same table.
        grown = encoding["factor"] * max(length, table.max_position_embeddings) / table.max_position_embeddings
        theta = frequencies.ntk_theta(table.rope_theta, grown - (encoding["factor"] - 1), table.rotary_dim)
        native = {"rope_type": "default", "rope_theta": theta}
    frozen = table.becomes(inv_freq, rope_parameters=native, attention_scaling=scaling)
    # A method that recomputes a table from its base starts from the model's own base, not from the grown one.
    return replace(frozen, rope_theta=table.rope_theta)
