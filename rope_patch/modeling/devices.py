"""Which device holds sums in float64, and how tensors come to the CPU without waiting for each."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten


def device_of_sums(device: torch.device) -> torch.device:
    """Return the device of sums in float64: that of what is added up, where nobody waits, if it has float64."""
    return device if device.type in ("cpu", "cuda") else torch.device("cpu")


def on_cpu(tree: Any) -> Any:
    """Return lists and dicts of tensors on the CPU: a device is waited for once for all of one type, not for each."""
    tensors, structure = tree_flatten(tree)
    moved = list(tensors)
    for kind in {(tensor.device, tensor.dtype) for tensor in tensors}:
        places = [at for at, tensor in enumerate(tensors) if (tensor.device, tensor.dtype) == kind]
        sizes = [tensors[at].numel() for at in places]
        parts = torch.split(torch.cat([tensors[at].flatten() for at in places]).cpu(), sizes)
        for at, part in zip(places, parts, strict=True):
            moved[at] = part.view(tensors[at].shape)
    return tree_unflatten(moved, structure)
