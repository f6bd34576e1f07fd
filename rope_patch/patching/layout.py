"""How a rotary module lays out cos and sin, and its own forward pass over tables that it does not hold."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

HALVES, NEIGHBOURS, ONCE, COMPLEX = "halves", "neighbours", "once", "complex"


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
        self.stand_in: Any = type(f"{cls.__name__}StandIn", (_StandIn,), shared)
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
        prefix = "" if layer_type is None else f"{layer_type}_"
        stand_in = self.stand_in(self.attributes, prefix, inv_freq, scaling)
        if layer_type is None:
            return self.forward(stand_in, x, position_ids)
        return self.forward(stand_in, x, position_ids, layer_type=layer_type)

    def __reduce__(self) -> tuple[type[OriginalForward], tuple[nn.Module]]:
        return OriginalForward, (self.original,)  # the class of the stand-in has no name to be found by


class _StandIn:
    def __init__(self, attributes: Mapping[str, Any], prefix: str, inv_freq: Tensor, scaling: float | Tensor) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)
        setattr(self, f"{prefix}inv_freq", inv_freq)
        setattr(self, f"{prefix}attention_scaling", scaling)


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
