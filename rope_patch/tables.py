"""One rotary table of a model, as a value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rope_patch.frequencies import fingerprint, geometric, is_geometric, unrotated, zero_unrotated

# Keys of `rope_parameters` that describe the table itself; all others are the model's own and are kept.
_TABLE_KEYS = frozenset(
    [
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "truncate",
        "mscale",
        "mscale_all_dim",
        "short_factor",
        "long_factor",
        "short_mscale",
        "long_mscale",
        "low_freq_factor",
        "high_freq_factor",
    ]
)


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """One rotary table of a model, as found or as a method leaves it.

    Attributes:
        inv_freq: (pairs,) float32 on the CPU [rad/token].
        attention_scaling: the attention factor, by which cos and sin are multiplied.
        rope_theta: the base of the geometric sequence that the table started from.
        rope_type: transformers' name for the kind of table, or ``"custom"``.
        max_position_embeddings: the context that the config states [tokens].
        original_max_position_embeddings: the context before scaling, where the config states one; else None [tokens].
        layer_type: the type of the layers that use the table, ``"full_attention"`` or ``"sliding_attention"``; None
            where all layers share one table.
        path: the path of the rotary module within the model.
        rope_parameters: the encoding from which transformers itself computes this table; None where no such encoding is
            known.
        other_keys: further keys of the config's ``rope_parameters`` that every encoding keeps, such as Phi's
            ``partial_rotary_factor``.
    """

    inv_freq: Tensor
    attention_scaling: float
    rope_theta: float
    rope_type: str
    max_position_embeddings: int
    original_max_position_embeddings: int | None = None
    layer_type: str | None = None
    path: str = "rotary_emb"
    rope_parameters: Mapping[str, Any] | None = None
    other_keys: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pairs(self) -> int:
        """Number of pairs of features that share an angle."""
        return len(self.inv_freq)

    @property
    def rotary_dim(self) -> int:
        """Number of features the table covers; unrotated pairs included."""
        return 2 * self.pairs

    @property
    def context(self) -> int:
        """The trained context [tokens]: the original one where the checkpoint is already scaled."""
        return self.original_max_position_embeddings or self.max_position_embeddings

    @property
    def is_geometric(self) -> bool:
        """Whether the numbers are those of plain RoPE: a geometric table without scaling."""
        return self.attention_scaling == 1.0 and is_geometric(self.inv_freq, self.rope_theta)

    @property
    def is_plain(self) -> bool:
        """Whether this is plain RoPE by its type, too: a scaled type with a factor of 1 has settings to keep."""
        return self.rope_type == "default" and self.is_geometric

    @property
    def is_dynamic(self) -> bool:
        """Whether the table changes during the forward pass, with the length."""
        return changes_with_length({**(self.rope_parameters or {}), "rope_type": self.rope_type})

    @property
    def name(self) -> str:
        """What the table is called in messages: its path, and its layer type where there are several."""
        return self.path if self.layer_type is None else f"{self.path} [{self.layer_type}]"

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits of the table and its scaling."""
        return fingerprint(self.inv_freq, self.attention_scaling)

    def plain(self) -> RotaryTable:
        """Return plain RoPE of the same base: the table without its scaling."""
        encoding = {"rope_type": "default", "rope_theta": self.rope_theta}
        plain = geometric(self.rope_theta, self.rotary_dim)
        return self.becomes(plain, rope_parameters=encoding, attention_scaling=1.0)

    def becomes(
        self,
        inv_freq: Tensor,
        *,
        rope_parameters: Mapping[str, Any] | None = None,
        attention_scaling: float | None = None,
    ) -> RotaryTable:
        """Return the table with new numbers.

        Args:
            inv_freq: (pairs,) float32, the new frequencies [rad/token].
            rope_parameters: the encoding from which transformers computes them, without ``other_keys``; None where it
                has none.
            attention_scaling: the new attention factor, by which cos and sin are multiplied; by default the present
                one.
        """
        scaling = self.attention_scaling if attention_scaling is None else attention_scaling
        if not bool(torch.isfinite(inv_freq).all()) or bool((inv_freq < 0).any()):
            raise ValueError(f"the table of {self.path} would hold infinite, NaN or negative frequencies")
        if not (math.isfinite(scaling) and scaling > 0):
            raise ValueError(f"attention_scaling must be a finite number > 0, got {scaling}")
        rope_theta = self.rope_theta
        rope_type = "custom"
        if rope_parameters is not None:
            rope_theta = float(rope_parameters["rope_theta"])
            rope_type = str(rope_parameters["rope_type"])
            rope_parameters = {**self.other_keys, **rope_parameters}
        return replace(
            self,
            inv_freq=zero_unrotated(inv_freq),
            attention_scaling=scaling,
            rope_theta=rope_theta,
            rope_type=rope_type,
            rope_parameters=rope_parameters,
        )

    def __str__(self) -> str:
        slow = int(unrotated(self.inv_freq).sum())
        return (
            f"{self.name}: {self.rope_type}, {self.pairs} pairs ({slow} unrotated), rope_theta {self.rope_theta:g}, "
            f"attention_scaling {self.attention_scaling:g}, table {self.fingerprint}"
        )


Tables = Mapping[str | None, RotaryTable]
"""The tables of a model by layer type; a single one under the key None, where all layers share it."""


def choose_layer_types(
    tables: Tables, layer_types: Sequence[str] | None, needed: Sequence[str] = ()
) -> tuple[str | None, ...]:
    """Return the layer types to patch: those named, or full attention; ``(None,)`` where there is one table for all.

    Args:
        tables: the tables of the model, by layer type.
        layer_types: the layer types that the user names; by default full attention.
        needed: the layer types that the method itself names, which must be among those that are patched.

    Raises:
        ValueError: an unknown layer type, none at all, one that is needed and not patched, or one named where there is
            one table for all.
    """
    if None in tables:
        if named := (*(layer_types or ()), *needed):
            raise ValueError(f"this model has one table for all layers: leave out the layer type {', '.join(named)}")
        return (None,)
    # Layers with a sliding window never see distances beyond it, so a longer context changes nothing for them.
    if layer_types is None:
        layer_types = ("full_attention",)
    # A single name is a string, which `tuple` would take apart into letters.
    if isinstance(layer_types, str):
        layer_types = (layer_types,)
    chosen = tuple(layer_types)
    if not chosen:
        raise ValueError(f"layer_types is empty, so nothing would be patched. Known: {', '.join(map(str, tables))}")
    for kind in (*chosen, *needed):
        if kind not in tables:
            raise ValueError(
                f"no table for layer type {kind!r}: name some of {[*tables]} in layer_types (--layer-type)"
            )
        if kind not in chosen:
            raise ValueError(f"the method is for {kind!r}, which is not patched: name it in layer_types (--layer-type)")
    return chosen


def changes_with_length(rope_parameters: Mapping[str, Any]) -> bool:
    """Tell whether ``rope_parameters`` describe a table that changes during the forward pass, with the length."""
    rope_type = rope_parameters.get("rope_type", "default")
    # Longrope has one table for short texts and another for long ones; with equal factors they are the same.
    two = rope_type == "longrope" and rope_parameters["short_factor"] != rope_parameters["long_factor"]
    return "dynamic" in rope_type or two


def other_keys(rope_parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a config's ``rope_parameters`` that do not describe the table.

    For the type ``proportional`` the partial factor is p and describes the table; elsewhere it is the model's shape.
    """
    own = {key: value for key, value in rope_parameters.items() if key not in _TABLE_KEYS}
    if rope_parameters.get("rope_type") == "proportional":
        own.pop("partial_rotary_factor", None)
    return own
