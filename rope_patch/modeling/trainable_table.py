"""A rotary module whose tables are parameters, while they are fitted or trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rope_patch import frequencies
from rope_patch.methods import Chain, Method, Table
from rope_patch.patching.module import PatchedRotary


@dataclass(frozen=True)
class Constraint:
    """Constraints on a fitted table.

    Attributes:
        band: the largest factor by which a frequency may differ from its start; None for no limit.
        monotone: keep the pairs in order, fast to slow.
        curve: describe the factors on the frequencies by this many cosines over the pairs, a smooth curve; None fits
            each pair's factor on its own.
        scaling: fit the attention scaling (the factor on cos and sin), too. Text alone lowers it below YaRN's value,
            which loses far passkeys.

    Raises:
        ValueError: a band of 1 or less, or a curve of no cosine.
    """

    band: float | None = None
    monotone: bool = False
    curve: int | None = None
    scaling: bool = False

    def __post_init__(self) -> None:
        if self.band is not None and not 1 < self.band < math.inf:
            raise ValueError(f"band must be a factor > 1, got {self.band}")
        if self.curve is not None and self.curve < 1:
            raise ValueError(f"curve must be >= 1 cosines, got {self.curve}")


class TrainableTable(nn.Module):
    """A rotary module whose tables are float64 parameters: the logarithms of factors on the frequencies.

    It replaces a :class:`~rope_patch.PatchedRotary` while a table is fitted, and computes the same. Unrotated pairs
    stay unrotated. The logarithm of a pair is divided by 1 plus its turns within the trained context: a change of 1 %
    moves a fast pair by many radians at far positions, so steps of one size for all pairs would be too large for the
    fast ones. A cast would round the parameters, and raises.

    Args:
        module: the module that it replaces.
        kinds: the layer types whose tables are fitted.
        constraint: on the tables.

    Attributes:
        consecutive: layer types whose tokens count as consecutive, whatever positions are sent: sliding layers, when
            rows skip positions.

    Raises:
        ValueError: every pair of a table is unrotated, or ``monotone`` with a start whose pairs are not in order.
    """

    def __init__(self, module: PatchedRotary, kinds: Sequence[str | None], constraint: Constraint) -> None:
        super().__init__()
        self.module, self.kinds, self.constraint = (module,), tuple(kinds), constraint
        self.config = module.config
        self.consecutive: Collection[str | None] = ()
        self.log_factors, self.log_scaling = nn.ParameterList(), nn.ParameterList()
        for kind in kinds:
            slot = module.tables[kind]
            moving = ~frequencies.unrotated(slot.inv_freq)
            count = int(moving.sum())
            if not count:
                raise ValueError(f"all pairs of {slot.path} are unrotated: there is no frequency to fit")
            if constraint.monotone and bool((slot.inv_freq[moving].diff() > 0).any()):
                raise ValueError("monotone needs a start whose pairs are in order, fast to slow")
            size = count if constraint.curve is None else min(constraint.curve, count)
            self.log_factors.append(nn.Parameter(torch.zeros(size, dtype=torch.float64)))
            scaling = nn.Parameter(torch.zeros((), dtype=torch.float64), requires_grad=constraint.scaling)
            self.log_scaling.append(scaling)

    def table(self, kind: str | None) -> tuple[Tensor, Tensor]:
        """Return inv_freq (pairs,) [rad/token] and the attention scaling of a layer type, float64, with gradients."""
        i = self.kinds.index(kind)
        slot, log_factors = self.module[0].tables[kind], self.log_factors[i]
        start = slot.inv_freq.to(log_factors.device, torch.float64)
        moving = ~frequencies.unrotated(start)
        if self.constraint.curve is not None:
            log_factors = _cosines(int(moving.sum()), len(log_factors)).to(log_factors.device) @ log_factors
        if self.constraint.band is not None:
            limit = math.log(self.constraint.band)
            log_factors = limit * torch.tanh(log_factors / limit)
        turns = start[moving] * slot.context / (2 * math.pi)
        fitted = start[moving] * (log_factors / (1 + turns)).exp()
        if self.constraint.monotone:
            fitted = fitted.cummin(0).values
        return start.masked_scatter(moving, fitted), slot.attention_scaling * self.log_scaling[i].exp()

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Return cos and sin as :meth:`rope_patch.PatchedRotary.forward` does, with gradients."""
        if layer_type in self.consecutive:
            position_ids = torch.arange(position_ids.shape[-1], device=position_ids.device)[None]
        if layer_type not in self.kinds:
            return self.module[0](x, position_ids, layer_type)
        table, scaling = self.table(layer_type)
        if self.module[0].by_original is not None:
            table, scaling = table.to(x.device, torch.float32), scaling.to(x.device, torch.float32)
            return self.module[0].by_original(x, position_ids, layer_type, table, scaling)
        kind = torch.float64 if x.dtype == torch.float64 else torch.float32
        angles = position_ids[..., None].to(kind) * table.to(x.device, kind)
        angles = torch.cat((angles, angles), dim=-1)
        scaling = scaling.to(x.device, kind)
        dtype = torch.float32 if self.module[0].keep_float32 else x.dtype
        return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)

    def method(self) -> Method:
        """Return the current tables as a method."""
        methods = []
        for kind in self.kinds:
            table, scaling = self.table(kind)
            values = tuple(frequencies.zero_unrotated(table.detach().float().cpu()).tolist())
            methods.append(Table(values, float(scaling.detach()), kind if len(self.kinds) > 1 else None))
        return methods[0] if len(methods) == 1 else Chain(tuple(methods))

    def stateable(self) -> bool:
        """Return whether a config can state the current tables: finite numbers, and attention scalings > 0."""
        tensors = [tensor.detach().float() for kind in self.kinds for tensor in self.table(kind)]
        return all(bool(tensor.isfinite().all()) for tensor in tensors) and all(bool(s > 0) for s in tensors[1::2])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TrainableTable:
        if fn(torch.empty(0, dtype=torch.float64)).dtype != torch.float64:
            raise TypeError("a cast would round the table that is being fitted: cast the model before or after the fit")
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]


def _cosines(pairs: int, count: int) -> Tensor:
    """Return the first cosines over pairs: (pairs, count) float64."""
    places = (torch.arange(pairs, dtype=torch.float64) + 0.5) / pairs
    return torch.cos(math.pi * places[:, None] * torch.arange(count, dtype=torch.float64))
