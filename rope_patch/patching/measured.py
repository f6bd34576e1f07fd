"""Measure what a rotary module really computes, by calling it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rope_patch import frequencies
from rope_patch.patching.record import TableRecord, key_of
from rope_patch.patching.rotary import RotaryLayout, call

# Position 1 shows the frequencies themselves. The far positions multiply a small relative error until it can be seen.
_POSITIONS = (0, 1, 2, 3, 17, 101, 1009, 4093)


@dataclass(frozen=True, eq=False)
class Measured:
    """A measurement of the table that a rotary module uses.

    Attributes:
        key: the layer type of the table; ``"all"`` if all layers share one.
        expected: the table with which the module was compared.
        problem: a line on what differs; None if nothing does.
        inv_freq: (pairs,) float32, the frequencies in use, which are the angles at position 1 [rad/token]; None if the
            module cannot be called, or has another number of pairs.
        attention_scaling: the attention factor in use; None if ``inv_freq`` is.
        angle_error: the largest difference of an angle from the expected one [rad]; None if ``inv_freq`` is, or if an
            angle is not finite.
        position: the position of that angle [tokens]; None if ``angle_error`` is.
    """

    key: str
    expected: TableRecord
    problem: str | None
    inv_freq: Tensor | None = None
    attention_scaling: float | None = None
    angle_error: float | None = None
    position: int | None = None


def measure(
    module: nn.Module,
    layout: RotaryLayout,
    tables: Mapping[str, TableRecord],
    device: torch.device,
    *,
    context: int | None = None,
) -> list[Measured]:
    """Call a rotary module and compare its cos and sin with tables.

    Args:
        module: the rotary module that is called.
        layout: the layout in which the module returns cos and sin.
        tables: the expected tables, by layer type.
        device: the device on which the module is called.
        context: a length whose last position is compared, too [tokens].
    """
    compared = [*_POSITIONS]
    if context is not None:
        compared = [n for n in (*_POSITIONS, context - 1) if n < context]
    positions = torch.tensor([compared], device=device)
    return [_measured(module, layout, key, table, positions) for key, table in tables.items()]


def _measured(module: nn.Module, layout: RotaryLayout, key: str, table: TableRecord, positions: Tensor) -> Measured:
    device = positions.device
    kind = None if key == key_of(None) else key
    try:
        cos, sin = layout.pairs(call(module, kind, positions))
    except Exception as error:
        return Measured(key, table, f"[{key}] cannot be called: {error}")
    if cos.dtype != torch.float32 or cos.device.type != device.type:
        wrong_type = f"[{key}] cos is {cos.dtype} on {cos.device}, expected torch.float32 on {device}"
        return Measured(key, table, wrong_type)
    inv_freq = frequencies.table_of(table.inv_freq)
    if cos.shape[-1] != len(inv_freq):
        return Measured(key, table, f"[{key}] has {cos.shape[-1]} pairs, expected {len(inv_freq)}")
    # On the CPU, since not every device has doubles.
    got = torch.complex(cos.cpu().double(), sin.cpu().double())
    angles = positions.cpu()[..., None].double() * inv_freq.double()
    wanted = torch.polar(torch.full_like(angles, table.attention_scaling), angles)
    in_use = got[0, 1].angle().float()
    scaling = float(got[0, 1].abs().mean())
    if not bool(torch.isfinite(torch.view_as_real(got)).all()):
        return Measured(key, table, f"[{key}] cos and sin are not finite", in_use, scaling)
    # `off` compares cos and sin, which the attention factor changes, too; `turned` compares the angles alone.
    off = torch.view_as_real(got - wanted).abs().amax(-1)
    turned = (got * wanted.conj()).angle().abs()[0].amax(-1)
    # float32 angles carry a relative error of 6e-8; a table off by 1e-5 shows at the far positions.
    excess = off - (2e-6 + 2e-7 * angles) * table.attention_scaling
    problem: str | None = None
    if bool((excess > 0).any()):
        pair = int(excess[0].amax(0).argmax())
        turns = math.atan2(float(sin[0, 1, pair]), float(cos[0, 1, pair]))
        what = f"pair {pair} turns {turns:.6g} rad/token, expected {table.inv_freq[pair]:.6g}"
        if math.isclose(turns, table.inv_freq[pair], rel_tol=1e-6):
            what = f"they are multiplied by {scaling:.6g}, expected {table.attention_scaling:.6g}"
        problem = f"[{key}] cos and sin are off by up to {float(off.max()):.3g}: {what}"
    worst = int(turned.argmax())
    return Measured(key, table, problem, in_use, scaling, float(turned[worst]), int(positions[0, worst]))
