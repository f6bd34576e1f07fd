"""Put a model into eval mode, or replace its attention function, for the length of a ``with`` block."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedConfig


@contextlib.contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Measure without dropout, and with the caches that training with checkpointing switches off.

    Weights that FSDP2 has gathered meanwhile are given back: until then ``model.zero_grad()`` would miss the real ones.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")
        for module, mode in modes.items():
            module.training = mode
            if fsdp is not None and isinstance(module, fsdp.FSDPModule):
                module.reshard()


@contextlib.contextmanager
def attention_set_to(configs: Sequence[PreTrainedConfig], name: str) -> Iterator[None]:
    """Let the parts of a model with these configs attend through a registered function within a ``with`` block.

    As long as this lasts the model is not to be read from another thread.
    """
    before = [config._attn_implementation_internal for config in configs]
    for config in configs:
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config, old in zip(configs, before, strict=True):
            config._attn_implementation_internal = old
