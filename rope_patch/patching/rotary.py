"""Rotary embeddings: the modules of transformers, how they lay out cos and sin, and the one that takes their place."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rope_patch.tables import RotaryTable

# --- the modules of transformers -------------------------------------------------------------------------------------


def original_tables(module: nn.Module) -> dict[str | None, Tensor]:
    """Return the tables that a module of transformers owns, by layer type."""
    tables = {}
    for name, buffer in module.named_buffers(recurse=False):
        # The copies in original_inv_freq, to which a dynamic table returns for short sequences, are not in use.
        if name.endswith("inv_freq") and "original_" not in name:
            tables[name.removesuffix("inv_freq").removesuffix("_") or None] = buffer
    return tables


def scaling_of(module: nn.Module, layer_type: str | None) -> float:
    """Return the factor on cos and sin of a rotary module, for the table of a layer type."""
    name = "attention_scaling"
    if layer_type is not None:
        name = f"{layer_type}_attention_scaling"
    return float(getattr(module, name))


def call(module: nn.Module, layer_type: str | None, position_ids: Tensor) -> Any:
    """Return what a rotary module, original or patched, returns for a model that computes in float32."""
    # Rotary modules take from x its dtype and device alone.
    x = torch.zeros(1, dtype=torch.float32, device=position_ids.device)
    if layer_type is None:
        return module(x, position_ids)
    return module(x, position_ids, layer_type=layer_type)


class RotaryLayout(Enum):
    """The layout in which a rotary module returns cos and sin.

    ``halves`` has all pairs and then all again (Llama), ``neighbours`` each pair twice (Cohere), ``once`` each pair
    once (gpt-oss), ``complex`` one complex number for each pair (Llama 4).
    """

    HALVES = "halves"
    NEIGHBOURS = "neighbours"
    ONCE = "once"
    COMPLEX = "complex"

    def parts(self, returned: Any) -> tuple[Tensor, Tensor]:
        """Return cos and sin from what a rotary module returned, in the layout of the module."""
        if self is RotaryLayout.COMPLEX:
            return returned.real, returned.imag
        cos, sin = returned
        return cos, sin

    def pairs(self, returned: Any) -> tuple[Tensor, Tensor]:
        """Return cos and sin of each pair from what a rotary module returned: (..., pairs) each."""
        cos, sin = self.parts(returned)
        if self is RotaryLayout.HALVES:
            return cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2]
        if self is RotaryLayout.NEIGHBOURS:
            return cos[..., ::2], sin[..., ::2]
        return cos, sin

    def spread(self, pairs: Tensor) -> Tensor:
        """Return the cos or the sin of pairs, (..., pairs), in the layout of the module.

        >>> RotaryLayout("halves").spread(torch.tensor([1, 2])), RotaryLayout("neighbours").spread(torch.tensor([1, 2]))
        (tensor([1, 2, 1, 2]), tensor([1, 1, 2, 2]))
        """
        if self is RotaryLayout.HALVES:
            return torch.cat((pairs, pairs), dim=-1)
        if self is RotaryLayout.NEIGHBOURS:
            return pairs.repeat_interleave(2, dim=-1)
        return pairs


class OriginalForward:
    """The forward pass of an original rotary module, over a table that is given with each call.

    The code of the family is run as it is, so that its layout, its position axes and its last bits are kept. Its
    ``self`` is a stand-in for the module, which has the same attributes and methods, but our ``inv_freq`` and
    ``attention_scaling``. The update of dynamic tables, a decorator of the forward pass, is left out.

    Args:
        original: the original module.
        code: the class whose forward pass is run; by default that of the module.
    """

    def __init__(self, original: nn.Module, code: type[nn.Module] | None = None) -> None:
        self.original = original
        self.code = code
        cls = code or type(original)
        # unwrap takes the decorator dynamic_rope_update off.
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
            x: any tensor with the dtype and the device of the result.
            position_ids: (batch, tokens) positions, or (axes, batch, tokens) [tokens].
            layer_type: layer type of the table that is replaced; None if the module has one table.
            inv_freq: (pairs,) frequencies of the given table [rad/token].
            scaling: factor on cos and sin.
        """
        # A new stand-in for each call, so that nothing of one call reaches another in a second thread.
        stand_in = self.stand_in()
        prefix = "" if layer_type is None else f"{layer_type}_"
        ours = {f"{prefix}inv_freq": inv_freq, f"{prefix}attention_scaling": scaling}
        for name, value in {**self.attributes, **ours}.items():
            setattr(stand_in, name, value)
        if layer_type is None:
            return self.forward(stand_in, x, position_ids)
        return self.forward(stand_in, x, position_ids, layer_type=layer_type)

    def __reduce__(self) -> tuple[type[OriginalForward], tuple[nn.Module, type[nn.Module] | None]]:
        # It is built anew, since pickle finds a class by its name, and that of the stand-in is in no module.
        return OriginalForward, (self.original, self.code)


@torch.no_grad()
def layout_of(original: nn.Module, layer_type: str | None, pairs: int) -> RotaryLayout | None:
    """Find how an original rotary module lays out cos and sin, by running its forward pass over a table of our own.

    Args:
        original: the original rotary module.
        layer_type: layer type of the table that is replaced; None if the module has one table.
        pairs: number of pairs of the table.

    Returns:
        The layout; None if the forward pass computes something else, such as a table of its own.
    """
    # Frequencies so far apart that at a few tokens every pair has another angle. In a real table the slow pairs are
    # nearly equal there.
    table = torch.linspace(1.0, 0.5, pairs, dtype=torch.float32, device="cpu")
    x = torch.zeros(1, dtype=torch.float32, device="cpu")
    steps = torch.tensor([[0, 1, 2, 5]], device="cpu")
    with contextlib.suppress(Exception):  # a rotary module of another kind may take or return something else
        returned = OriginalForward(original)(x, steps, layer_type, table, 1.0)
        for layout in RotaryLayout:
            if fits(layout, returned, steps[..., None].float() * table):
                return layout
    return None


def fits(layout: RotaryLayout, returned: Any, angles: Tensor, scaling: float = 1.0) -> bool:
    """Tell whether a rotary module returned cos and sin of angles in a layout.

    Args:
        layout: the layout that is tried.
        returned: the value that the module returned.
        angles: (batch, tokens, pairs) expected angles [rad].
        scaling: factor on cos and sin.
    """
    # A tensor of two rows would come apart into two.
    if isinstance(returned, Tensor) and layout is not RotaryLayout.COMPLEX:
        return False
    spread = layout.spread(angles)
    for got, want in zip(layout.parts(returned), (spread.cos() * scaling, spread.sin() * scaling), strict=True):
        if got.shape != want.shape or not torch.allclose(got.float(), want, atol=1e-5):
            return False
    return True


# --- the module that takes their place -------------------------------------------------------------------------------


class PatchedRotary(nn.Module):
    """The rotary module that is swapped in. It runs the original forward pass over tables that nothing can change.

    The original ``inv_freq`` is a buffer, which casts, ``to_empty``, sharding and re-initialisation corrupt in silence.
    In this module a table is a tuple of Python numbers; the tensor of them is cached per device, and is neither buffer
    nor parameter. It is called as the original modules are, ``rotary_emb(x, position_ids[, layer_type]) -> (cos,
    sin)``, and the code of the family runs in it: ``torch.equal`` for an equal table, in its layout, on its position
    axes and in its dtype. Code that computes a table of its own in each pass, as that of Phi-MoE, is replaced by
    Llama's.

    Args:
        tables: tables by layer type; a single one under None on a model with one table for all layers.
        original: the module that is replaced, which is kept for :meth:`restore <rope_patch.Patch.restore>`.

    Attributes:
        by_original: the forward pass that runs over the tables.
    """

    def __init__(self, tables: Mapping[str | None, RotaryTable], original: nn.Module) -> None:
        super().__init__()
        self.tables = dict(tables)
        self._numbers = {kind: tuple(table.inv_freq.tolist()) for kind, table in tables.items()}
        self._cached: dict[Any, Tensor] = {}
        # It holds the original out of sight of torch: casts and state_dict would reach a child.
        follows = all(layout_of(original, kind, len(table.inv_freq)) for kind, table in tables.items())
        self.by_original = OriginalForward(original, None if follows else LlamaRotaryEmbedding)
        # What attention code may look up on an original module.
        types = {kind: table.rope_type for kind, table in tables.items()}
        self.rope_type: Any = types.get(None, types)
        for kind, table in tables.items():
            name = "attention_scaling" if kind is None else f"{kind}_attention_scaling"
            setattr(self, name, table.attention_scaling)

    @property
    def original(self) -> nn.Module:
        """The module that this one replaced, unchanged."""
        return self.by_original.original

    def table(self, layer_type: str | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Return the ``inv_freq`` of a layer type: (pairs,) float32 [rad/token] on ``device``."""
        device = torch.device(device)
        key = (layer_type, device)
        cached = self._cached.get(key)
        if cached is None:
            # A tensor that is made in inference mode could not be used in training later.
            with torch.inference_mode(False):
                cached = torch.tensor(self._numbers[layer_type], dtype=torch.float32, device=device)
            if type(cached) is Tensor:  # a tracer's fake tensor has no numbers for later calls
                self._cached[key] = cached
        return cached

    def __getattr__(self, name: str) -> Any:
        """Return buffers (``inv_freq``, ``full_attention_inv_freq`` …) and attributes that the original module has."""
        # copy and pickle ask for attributes before there are any: without a look at __dict__ this would not end.
        if name.endswith("inv_freq") and "_numbers" in self.__dict__:
            kind = name.removesuffix("inv_freq").removesuffix("original_").removesuffix("_") or None
            if kind in self._numbers:
                device = next((device for _, device in self._cached), torch.device("cpu"))
                return self.table(kind, device)
        if not name.startswith("_") and "by_original" in self.__dict__ and name in self.original.__dict__:
            return self.original.__dict__[name]  # a model may look up something of its own, as LFM3 its layer_types
        return super().__getattr__(name)

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Return what the original module would return if it held the table: mostly cos and sin.

        Args:
            x: any tensor with the dtype and the device of the result.
            position_ids: (batch, tokens) positions, or (axes, batch, tokens) if there are several axes [tokens].
            layer_type: layer type whose table is used, on a model with several tables.
        """
        inv_freq = self.table(layer_type, x.device)
        return self.by_original(x, position_ids, layer_type, inv_freq, self.tables[layer_type].attention_scaling)

    def __getstate__(self) -> dict[str, Any]:
        # A cached tensor may be on a device that the reading machine does not have.
        return {**self.__dict__, "_cached": {}}

    def extra_repr(self) -> str:
        """Show the tables in ``print(model)``."""
        return "\n".join(str(table) for table in self.tables.values())
