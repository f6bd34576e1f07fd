"""A rotary module whose tables are parameters, while they are fitted or trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rope_patch import frequencies
from rope_patch.methods import Chain, Method, Table
from rope_patch.patching.rotary import PatchedRotary


class TrainableTable(nn.Module):
    """A rotary module whose tables are float64 parameters: the logarithms of factors on the frequencies.

    It replaces a :class:`~rope_patch.PatchedRotary` while a table is fitted, and computes the same. Unrotated pairs
    stay unrotated, and the attention scaling stays as it is. The logarithm of a pair is divided by 1 plus its turns
    within the trained context: a change of 1 % moves a fast pair by many radians at far positions, so steps of one size
    for all pairs would be too large for the fast ones. A cast would round the parameters, and raises.

    Args:
        module: the patched rotary module that is replaced.
        kinds: layer types whose tables are fitted; None stands for the one table of all layers.

    Attributes:
        consecutive: layer types whose layers count tokens one by one, whatever positions are given. They are the
            sliding layers if rows skip positions, because such layers never see long distances.

    Raises:
        ValueError: every pair of a table is unrotated.
    """

    def __init__(self, module: PatchedRotary, kinds: Sequence[str | None]) -> None:
        super().__init__()
        # In a tuple, so that torch does not register it as a child.
        self.module, self.kinds = (module,), tuple(kinds)
        self.config = module.config
        self.consecutive: Collection[str | None] = ()
        self.log_factors = nn.ParameterList()
        for kind in kinds:
            slot = module.tables[kind]
            count = int((~frequencies.unrotated(slot.inv_freq)).sum())
            if not count:
                raise ValueError(f"all pairs of {slot.path} are unrotated: there is no frequency to fit")
            self.log_factors.append(nn.Parameter(torch.zeros(count, dtype=torch.float64)))

    def table(self, kind: str | None) -> Tensor:
        """Return the ``inv_freq`` of a layer type: (pairs,) float64 [rad/token], with gradients."""
        slot, log_factors = self.module[0].tables[kind], self.log_factors[self.kinds.index(kind)]
        start = slot.inv_freq.to(log_factors.device, torch.float64)
        moving = ~frequencies.unrotated(start)
        turns = start[moving] * slot.context / (2 * math.pi)
        return start.masked_scatter(moving, start[moving] * (log_factors / (1 + turns)).exp())

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Return cos and sin as :meth:`rope_patch.PatchedRotary.forward` does, with gradients."""
        module = self.module[0]
        if layer_type in self.consecutive:
            position_ids = torch.arange(position_ids.shape[-1], device=position_ids.device)[None]
        if layer_type not in self.kinds:
            return module(x, position_ids, layer_type)
        table, scaling = self.table(layer_type), float(module.tables[layer_type].attention_scaling)
        if module.by_original is not None:
            return module.by_original(x, position_ids, layer_type, table.to(x.device, torch.float32), scaling)
        kind = torch.float64 if x.dtype == torch.float64 else torch.float32
        angles = position_ids[..., None].to(kind) * table.to(x.device, kind)
        angles = torch.cat((angles, angles), dim=-1)
        dtype = torch.float32 if module.keep_float32 else x.dtype
        return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)

    def method(self) -> Method:
        """Return the current tables as a method."""
        methods = []
        for kind in self.kinds:
            values = tuple(frequencies.zero_unrotated(self.table(kind).detach().float().cpu()).tolist())
            scaling = float(self.module[0].tables[kind].attention_scaling)
            methods.append(Table(values, scaling, kind if len(self.kinds) > 1 else None))
        return methods[0] if len(methods) == 1 else Chain(tuple(methods))

    def stateable(self) -> bool:
        """Tell whether a config can state the current tables, which needs all of their numbers to be finite."""
        return all(bool(self.table(kind).detach().float().isfinite().all()) for kind in self.kinds)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TrainableTable:
        # `.to`, `.half` and the like call this for each module: an empty tensor shows whether they change the dtype.
        if fn(torch.empty(0, dtype=torch.float64)).dtype != torch.float64:
            raise TypeError("a cast would round the table that is being fitted: cast the model before or after the fit")
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]
