"""The rotary embedding that is put into a model: the original arithmetic over tables that nothing can change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rope_patch.patching.layout import OriginalForward, RotaryLayout, layout_of
from rope_patch.tables import RotaryTable


class PatchedRotary(nn.Module):
    """The rotary embedding that is swapped in: the original arithmetic over tables that nothing can change.

    The original ``inv_freq`` is a buffer, which casts, ``to_empty``, sharding and re-initialisation corrupt in silence.
    In this module a table is a tuple of Python numbers; the tensor of them is cached per device, and is neither buffer
    nor parameter. It is called as the original modules are, ``rotary_emb(x, position_ids[, layer_type]) -> (cos,
    sin)``, and computes what they compute, in the same float32 operations: ``torch.equal`` for an equal table. Where a
    family lays cos and sin out in another way than Llama, or has several position axes, its own forward pass is run.

    Args:
        tables: one table per layer type of the module; a single one with ``layer_type`` None on unmixed models.
        original: the module it stands in for, kept aside for :meth:`restore <rope_patch.Patch.restore>`.
        precision: ``"float64"`` multiplies positions and frequencies in double, for positions beyond about 1e5.
        keep_float32: return float32 whatever the model computes in, as the original module does (OLMo, ERNIE 4.5).

    Attributes:
        layout: how cos and sin are laid out.
        by_original: the forward pass of the original, which is run in its own layout; None in that of Llama.

    Raises:
        ValueError: ``"float64"`` where the original's forward pass is run.
    """

    def __init__(
        self,
        tables: Mapping[str | None, RotaryTable],
        original: nn.Module,
        precision: str = "float32",
        *,
        keep_float32: bool = False,
    ) -> None:
        super().__init__()
        self.tables = dict(tables)
        self.precision, self.keep_float32 = precision, keep_float32
        self.config = original.config
        self.max_seq_len_cached = self.original_max_seq_len = next(iter(tables.values())).max_position_embeddings
        self._angle_dtype = torch.float64 if precision == "float64" else torch.float32
        self._numbers = {kind: tuple(table.inv_freq.tolist()) for kind, table in tables.items()}
        self._scaling = {kind: float(table.attention_scaling) for kind, table in tables.items()}
        self._cached: dict[Any, Tensor] = {}
        self._original = (original,)  # in a tuple: out of reach of casts and of state_dict
        kind, table = next(iter(tables.items()))
        self.layout = layout_of(original, kind, table.pairs)
        self.by_original = None if self.layout == RotaryLayout() else OriginalForward(original)
        if self.by_original is not None and precision == "float64":
            raise ValueError(
                f"precision='float64' is for the layout of Llama: {type(original).__name__} computes its angles in "
                "float32 itself. Leave precision out"
            )
        # What attention code may look up on an original module.
        types = {kind: table.rope_type for kind, table in tables.items()}
        self.rope_type: Any = types.get(None, types)
        for kind, scaling in self._scaling.items():
            setattr(self, "attention_scaling" if kind is None else f"{kind}_attention_scaling", scaling)

    @property
    def original(self) -> nn.Module:
        """The module this one replaced, as it was."""
        return self._original[0]

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
        """Answer for the original module: its buffers (``inv_freq``, ``full_attention_inv_freq`` …) and attributes."""
        if name.endswith("inv_freq") and "_numbers" in self.__dict__:
            kind = name.removesuffix("inv_freq").removesuffix("original_").removesuffix("_") or None
            if kind in self._numbers:
                device = next((device for _, device in self._cached), torch.device("cpu"))
                return self.table(kind, device).float()
        if not name.startswith("_") and "_original" in self.__dict__ and name in self.original.__dict__:
            return self.original.__dict__[name]  # what a model looks up on its own module, LFM3 its layer_types
        return super().__getattr__(name)

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Return cos and sin: (batch, tokens, rotary_dim) each, in the dtype of ``x``, or as ``keep_float32`` says.

        In another :class:`~rope_patch.patching.layout.RotaryLayout` than Llama's it is what the original returns.

        Args:
            x: any tensor of the dtype and on the device to compute for.
            position_ids: (batch, tokens), or (axes, batch, tokens) where there are several position axes [tokens].
            layer_type: which table, on models that have several.
        """
        if self.by_original is not None:
            table = self.table(layer_type, x.device)
            return self.by_original(x, position_ids, layer_type, table, self._scaling[layer_type])
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
        return "\n".join(str(table) for table in self.tables.values())
