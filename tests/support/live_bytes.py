"""Count the bytes of tensors that are alive while a block runs, now and at most."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Count the bytes of tensors that are made within the block and are still alive.

    Attributes:
        now: bytes that are alive now.
        peak: the most bytes that were alive at one time.
        sizes: bytes of each storage that is known; 0 for those of the model, which do not count.
    """

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


def tiles_are_folded_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let TRL's loss fold a tile of logits in place, as its kernels for a GPU do."""
    kernels = pytest.importorskip("trl.kernels.chunked_logprob")
    monkeypatch.setattr(kernels, "_forward_tile", lambda tile, *_, **__: None)
    monkeypatch.setattr(kernels, "_backward_tile", lambda tile, *_, **__: None)
    monkeypatch.setattr(kernels, "_addmm_fp32", lambda sum, a, b: sum.add_(1))
