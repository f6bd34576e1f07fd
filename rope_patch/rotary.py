"""The two sides of a patch: the rotary table as found, and the module that is swapped in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from rope_patch.frequencies import fingerprint, is_geometric, settle, still

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
class RotarySlot:
    """One rotary table of a model, as found or as a method leaves it.

    Attributes:
        inv_freq: (pairs,) float32 on the CPU [rad/token].
        attention_scaling: factor on cos and sin.
        rope_theta: base of the geometric sequence the table started from.
        rope_type: transformers' name for the table, or ``"custom"``.
        max_position_embeddings: the context the config states [tokens].
        original_max_position_embeddings: the context before scaling, where the config states one.
        layer_type: ``None``, ``"full_attention"``, ``"sliding_attention"`` …
        path: module path of the rotary embedding.
        rope_parameters: how transformers could spell this table; None where no native spelling is known.
        other_keys: keys of the config's own that every spelling keeps (Phi's ``partial_rotary_factor``).
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
        """Number of features the table covers; still pairs included."""
        return 2 * self.pairs

    @property
    def context(self) -> int:
        """The trained context [tokens]: the original one where the checkpoint is already scaled."""
        return self.original_max_position_embeddings or self.max_position_embeddings

    @property
    def is_geometric(self) -> bool:
        """Whether this is plain RoPE: a geometric table without scaling."""
        return self.attention_scaling == 1.0 and is_geometric(self.inv_freq, self.rope_theta)

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits of the table and its scaling."""
        return fingerprint(self.inv_freq, self.attention_scaling)

    def becomes(
        self,
        inv_freq: Tensor,
        *,
        spelling: Mapping[str, Any] | None = None,
        attention_scaling: float | None = None,
    ) -> RotarySlot:
        """Return the slot with a new table.

        Args:
            inv_freq: (pairs,) float32 [rad/token].
            spelling: native ``rope_parameters`` for it, without ``other_keys``; None where transformers has none.
            attention_scaling: new factor on cos and sin; by default the present one.
        """
        scaling = self.attention_scaling if attention_scaling is None else attention_scaling
        if not bool(torch.isfinite(inv_freq).all()) or bool((inv_freq < 0).any()):
            raise ValueError(f"the table of {self.path} would hold infinite, NaN or negative frequencies")
        if not (math.isfinite(scaling) and scaling > 0):
            raise ValueError(f"attention_scaling must be a finite number > 0, got {scaling}")
        native = None if spelling is None else {**self.other_keys, **spelling}
        return replace(
            self,
            inv_freq=settle(inv_freq),
            attention_scaling=scaling,
            rope_theta=float(spelling["rope_theta"]) if spelling is not None else self.rope_theta,
            rope_type=str(spelling["rope_type"]) if spelling is not None else "custom",
            rope_parameters=native,
        )

    def __str__(self) -> str:
        where = self.path if self.layer_type is None else f"{self.path} [{self.layer_type}]"
        rests = int(still(self.inv_freq).sum())
        return (
            f"{where}: {self.rope_type}, {self.pairs} pairs ({rests} still), rope_theta {self.rope_theta:g}, "
            f"attention_scaling {self.attention_scaling:g}, table {self.fingerprint}"
        )


def other_keys(rope_parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a config's ``rope_parameters`` that do not describe the table.

    For the type ``proportional`` the partial factor is p and describes the table; elsewhere it is the model's shape.
    """
    own = {key: value for key, value in rope_parameters.items() if key not in _TABLE_KEYS}
    if rope_parameters.get("rope_type") == "proportional":
        own.pop("partial_rotary_factor", None)
    return own


class RotaryTable(nn.Module):
    """The rotary embedding that is swapped in: stock arithmetic over tables nothing can change.

    A stock ``inv_freq`` is a buffer, and casts, ``to_empty``, sharding and re-initialisation corrupt it in silence.
    Here a table is a tuple of Python numbers; the tensor made from it is cached per device and is neither buffer nor
    parameter. It is called as the stock modules are, ``rotary_emb(x, position_ids[, layer_type]) -> (cos, sin)``, and
    computes what they compute, in the same float32 operations: ``torch.equal`` for an equal table.

    Args:
        slots: one slot per layer type of the module; a single one with ``layer_type`` None on unmixed models.
        stock: the module it stands in for, kept aside for :meth:`restore <rope_patch.Patch.restore>`.
        precision: ``"float64"`` multiplies positions and frequencies in double, for positions beyond about 1e5.
        keep_float32: return float32 whatever the model computes in, as the stock module does (OLMo, ERNIE 4.5).
    """

    def __init__(
        self,
        slots: Mapping[str | None, RotarySlot],
        stock: nn.Module,
        precision: str = "float32",
        *,
        keep_float32: bool = False,
    ) -> None:
        super().__init__()
        self.slots = dict(slots)
        self.precision, self.keep_float32 = precision, keep_float32
        self.config = stock.config
        self.max_seq_len_cached = self.original_max_seq_len = next(iter(slots.values())).max_position_embeddings
        self._angle_dtype = torch.float64 if precision == "float64" else torch.float32
        self._numbers = {kind: tuple(slot.inv_freq.tolist()) for kind, slot in slots.items()}
        self._scaling = {kind: float(slot.attention_scaling) for kind, slot in slots.items()}
        self._cached: dict[Any, Tensor] = {}
        self._stock = (stock,)  # in a tuple: out of reach of casts and of state_dict
        # What attention code may look up on a stock module.
        types = {kind: slot.rope_type for kind, slot in slots.items()}
        self.rope_type: Any = types.get(None, types)
        for kind, scaling in self._scaling.items():
            setattr(self, "attention_scaling" if kind is None else f"{kind}_attention_scaling", scaling)

    @property
    def stock(self) -> nn.Module:
        """The module this one replaced, as it was."""
        return self._stock[0]

    def table(self, layer_type: str | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Return inv_freq: (pairs,) [rad/token] on ``device``, in the dtype the angles are computed in."""
        device = torch.device(device)
        key = (layer_type, device)
        cached = self._cached.get(key)
        if cached is None:
            with torch.inference_mode(False):
                cached = torch.tensor(self._numbers[layer_type], dtype=torch.float32, device=device).to(
                    self._angle_dtype
                )
            if type(cached) is Tensor:  # never keep a fake tensor of a tracer
                self._cached[key] = cached
        return cached

    def __getattr__(self, name: str) -> Any:
        """Answer for the stock module: its buffers (``inv_freq``, ``full_attention_inv_freq`` …) and attributes."""
        if name.endswith("inv_freq") and "_numbers" in self.__dict__:
            kind = name.removesuffix("inv_freq").removesuffix("original_").removesuffix("_") or None
            if kind in self._numbers:
                device = next((device for _, device in self._cached), torch.device("cpu"))
                return self.table(kind, device).float()
        if not name.startswith("_") and "_stock" in self.__dict__ and name in self.stock.__dict__:
            return self.stock.__dict__[name]  # what a model looks up on its own module, LFM3 its layer_types
        return super().__getattr__(name)

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """Return cos and sin: (batch, tokens, rotary_dim) each, in the dtype of ``x``, or as ``keep_float32`` says.

        Args:
            x: any tensor of the wanted dtype and device.
            position_ids: (batch, tokens) [tokens].
            layer_type: which table, on models that have several.
        """
        angles = position_ids[..., None].to(self._angle_dtype) * self.table(layer_type, x.device)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin, scaling = angles.cos(), angles.sin(), self._scaling[layer_type]
        if scaling != 1.0:
            cos, sin = cos * scaling, sin * scaling
        dtype = torch.float32 if self.keep_float32 else x.dtype
        return cos.to(dtype), sin.to(dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_cached": {},
        }  # a cached tensor may sit on a device the reader does not have

    def extra_repr(self) -> str:
        """Show the tables in ``print(model)``."""
        return "\n".join(str(slot) for slot in self.slots.values())
