"""Note how large the tensors are that operations make."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Note the largest tensor that any operation makes within the block.

    Attributes:
        measure: function that returns the size of a tensor.
        largest: the largest size so far.
    """

    def __init__(self, measure):
        super().__init__()
        self.measure = measure
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.ndim:
                self.largest = max(self.largest, self.measure(tensor))
        return out
