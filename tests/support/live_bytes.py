"""How many bytes of tensors are alive while a block runs, now and at most."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made inside it that are still alive, now and at most."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        own = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
        self.sizes = {t.untyped_storage()._cdata: 0 for t in own}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and (key := tensor.untyped_storage()._cdata) not in self.sizes:
                self.sizes[key] = tensor.untyped_storage().nbytes()
                self.now += self.sizes[key]
                self.peak = max(self.peak, self.now)
                weakref.finalize(tensor.untyped_storage(), self._freed, key)
        return out

    def _freed(self, key: int) -> None:
        self.now -= self.sizes.pop(key)
