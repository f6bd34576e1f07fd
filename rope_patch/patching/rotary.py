"""Rotary embeddings: the modules of transformers, how they lay out cos and sin, and the one that takes their place."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rope_patch.tables import RotaryTable

HALVES, NEIGHBOURS, ONCE, COMPLEX = "halves", "neighbours", "once", "complex"


# --- the modules of transformers -------------------------------------------------------------------------------------


def original_tables(module: nn.Module) -> dict[str | None, Tensor]:
    """Return the tables that a module of transformers owns, by layer type."""
    return {
        name.removesuffix("inv_freq").removesuffix("_") or None: buffer
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and "original_" not in name
    }


def scaling_of(module: nn.Module, layer_type: str | None) -> float:
    """Return a rotary module's factor on cos and sin."""
    return float(getattr(module, "attention_scaling" if layer_type is None else f"{layer_type}_attention_scaling"))


def call(module: nn.Module, layer_type: str | None, position_ids: Tensor, dtype: torch.dtype = torch.float32) -> Any:
    """Return what a rotary module, original or patched, returns for a model that computes in ``dtype``."""
    x = torch.zeros(1, dtype=dtype, device=position_ids.device)
    return module(x, position_ids) if layer_type is None else module(x, position_ids, layer_type=layer_type)


@dataclass(frozen=True)
class RotaryLayout:
    """How a rotary module lays out cos and sin.

    Attributes:
        features: ``halves`` repeats all pairs (Llama), ``neighbours`` each pair (Cohere), ``once`` repeats none
            (gpt-oss), ``complex`` is one complex tensor, a number for each pair (Llama 4).
        axes: the position axes between which the features are divided; 1 where a token has one position (Qwen-VL: 3).
    """

    features: str = HALVES
    axes: int = 1

    def parts(self, returned: Any) -> tuple[Tensor, Tensor]:
        """Return cos and sin of what a rotary module returned, as they are laid out.

        Raises:
            ValueError: it returned one tensor, and the layout is not complex.
        """
        if self.features == COMPLEX:
            return returned.real, returned.imag
        if isinstance(returned, Tensor):
            raise ValueError("it returns one tensor, of complex numbers or of angles")
        cos, sin = returned
        return cos, sin

    def pairs(self, returned: Any) -> tuple[Tensor, Tensor]:
        """Return cos and sin of each pair of what a rotary module returned: (..., pairs) each."""
        cos, sin = self.parts(returned)
        if self.features == HALVES:
            return cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2]
        return (cos[..., ::2], sin[..., ::2]) if self.features == NEIGHBOURS else (cos, sin)

    def spread(self, pairs: Tensor) -> Tensor:
        """Lay out the cos or the sin of pairs (..., pairs).

        >>> RotaryLayout("halves").spread(torch.tensor([1, 2])), RotaryLayout("neighbours").spread(torch.tensor([1, 2]))
        (tensor([1, 2, 1, 2]), tensor([1, 1, 2, 2]))
        """
        if self.features == HALVES:
            return torch.cat((pairs, pairs), dim=-1)
        return pairs.repeat_interleave(2, dim=-1) if self.features == NEIGHBOURS else pairs


class OriginalForward:
    """The forward pass of an original rotary module, over a table that is given with each call.

    The code of the family is run as it is, so that its layout, its position axes and its last bits are kept, on an
    object that answers for the module: the same attributes and methods, but ``inv_freq`` and ``attention_scaling`` are
    ours, and the update of dynamic tables around the forward pass is left out.
    """

    def __init__(self, original: nn.Module) -> None:
        self.original = original
        cls = type(original)
        self.forward = inspect.unwrap(cls.forward)
        inherited = [vars(base) for base in reversed(cls.__mro__) if base not in (object, nn.Module)]
        shared = {name: value for names in inherited for name, value in names.items() if not name.startswith("__")}
        self.stand_in: Any = type(f"{cls.__name__}StandIn", (), shared)
        ours = set(vars(nn.Module())) | {"forward"}
        self.attributes = {name: value for name, value in vars(original).items() if name not in ours}

    def __call__(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None, inv_freq: Tensor, scaling: float | Tensor
    ) -> Any:
        """Return what the module would return, if it held this table.

        Args:
            x: of the dtype and on the device to compute for.
            position_ids: (batch, tokens), or (axes, batch, tokens) [tokens].
            layer_type: which table of the module it stands for.
            inv_freq: (pairs,) [rad/token].
            scaling: factor on cos and sin.
        """
        stand_in = self.stand_in()
        prefix = "" if layer_type is None else f"{layer_type}_"
        ours = {f"{prefix}inv_freq": inv_freq, f"{prefix}attention_scaling": scaling}
        for name, value in {**self.attributes, **ours}.items():
            setattr(stand_in, name, value)
        if layer_type is None:
            return self.forward(stand_in, x, position_ids)
        return self.forward(stand_in, x, position_ids, layer_type=layer_type)

    def __reduce__(self) -> tuple[type[OriginalForward], tuple[nn.Module]]:
        return OriginalForward, (self.original,)  # the class of the stand-in has no name to be found by


@torch.no_grad()
def layout_of(original: nn.Module, layer_type: str | None, pairs: int) -> RotaryLayout:
    """Find how an original rotary module lays out cos and sin, by running its forward pass over a table of our own.

    Args:
        original: the module.
        layer_type: of the table.
        pairs: of the table.

    Returns:
        The layout; Llama's where the forward pass computes something else, which a check of its numbers then tells.
    """
    table = torch.linspace(1.0, 0.5, pairs, dtype=torch.float32, device="cpu")
    x = torch.zeros(1, dtype=torch.float32, device="cpu")
    steps = torch.tensor([[0, 1, 2, 5]], device="cpu")
    try:
        forward = OriginalForward(original)
        returned = forward(x, steps, layer_type, table, 1.0)
        names = (COMPLEX,) if isinstance(returned, Tensor) and returned.is_complex() else (HALVES, NEIGHBOURS, ONCE)
        angles = steps[..., None].float() * table
        features = next(name for name in names if _fits(RotaryLayout(name), returned, angles[None]))
    except Exception:  # of another family of rotary modules, which has a forward pass of another kind
        return RotaryLayout()
    for axes in (2, 3, 4):
        several = torch.stack([steps + 7 * axis for axis in range(axes)])
        try:
            returned = forward(x, several, layer_type, table, 1.0)
            if _fits(RotaryLayout(features), returned, several[..., None].float() * table):
                return RotaryLayout(features, axes)
        except Exception:  # a module of another number of axes cannot expand these positions
            continue
    return RotaryLayout(features)


def _fits(layout: RotaryLayout, returned: Any, angles: Tensor) -> bool:
    """Tell whether cos and sin are those of the angles in this layout, each feature's on one of the axes.

    Args:
        layout: to be tried.
        returned: by the module.
        angles: (axes, batch, tokens, pairs) [rad].
    """
    fits = torch.ones((), dtype=torch.bool, device="cpu")
    for got, want in zip(layout.parts(returned), (angles.cos(), angles.sin()), strict=True):
        spread = layout.spread(want)
        if got.shape != spread.shape[1:]:
            return False
        fits = fits & torch.isclose(got.float(), spread, atol=1e-5).flatten(1, 2).all(1)  # (axes, features)
    return bool(fits.any(0).all())


# --- the module that takes their place -------------------------------------------------------------------------------


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
        keep_float32: return float32 whatever the model computes in, as the original module does (OLMo, ERNIE 4.5).
        layout: how the original lays out cos and sin; by default that is found out.

    Attributes:
        layout: how cos and sin are laid out.
        by_original: the forward pass of the original, which is run in its own layout; None in that of Llama.
    """

    def __init__(
        self,
        tables: Mapping[str | None, RotaryTable],
        original: nn.Module,
        *,
        keep_float32: bool = False,
        layout: RotaryLayout | None = None,
    ) -> None:
        super().__init__()
        self.tables = dict(tables)
        self.keep_float32 = keep_float32
        self.config = original.config
        self.max_seq_len_cached = self.original_max_seq_len = next(iter(tables.values())).max_position_embeddings
        self._numbers = {kind: tuple(table.inv_freq.tolist()) for kind, table in tables.items()}
        self._scaling = {kind: float(table.attention_scaling) for kind, table in tables.items()}
        self._cached: dict[Any, Tensor] = {}
        self._original = (original,)  # in a tuple: out of reach of casts and of state_dict
        kind, table = next(iter(tables.items()))
        self.layout = layout or layout_of(original, kind, table.pairs)
        self.by_original = None if self.layout == RotaryLayout() else OriginalForward(original)
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
        """Return inv_freq: (pairs,) float32 [rad/token] on ``device``."""
        device = torch.device(device)
        key = (layer_type, device)
        cached = self._cached.get(key)
        if cached is None:
            with torch.inference_mode(False):
                cached = torch.tensor(self._numbers[layer_type], dtype=torch.float32, device=device)
            if type(cached) is Tensor:  # never keep a fake tensor of a tracer
                self._cached[key] = cached
        return cached

    def __getattr__(self, name: str) -> Any:
        """Answer for the original module: its buffers (``inv_freq``, ``full_attention_inv_freq`` …) and attributes."""
        if name.endswith("inv_freq") and "_numbers" in self.__dict__:
            kind = name.removesuffix("inv_freq").removesuffix("original_").removesuffix("_") or None
            if kind in self._numbers:
                device = next((device for _, device in self._cached), torch.device("cpu"))
                return self.table(kind, device)
        if not name.startswith("_") and "_original" in self.__dict__ and name in self.original.__dict__:
            return self.original.__dict__[name]  # what a model looks up on its own module, LFM3 its layer_types
        return super().__getattr__(name)

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Return cos and sin: (batch, tokens, rotary_dim) each, in the dtype of ``x``, or as ``keep_float32`` says.

        In another :class:`RotaryLayout` than Llama's it is what the original returns.

        Args:
            x: any tensor of the dtype and on the device to compute for.
            position_ids: (batch, tokens), or (axes, batch, tokens) where there are several position axes [tokens].
            layer_type: which table, on models that have several.
        """
        if self.by_original is not None:
            table = self.table(layer_type, x.device)
            return self.by_original(x, position_ids, layer_type, table, self._scaling[layer_type])
        angles = position_ids[..., None].float() * self.table(layer_type, x.device)
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
