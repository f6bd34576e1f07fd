"""Put a model into eval mode, or replace its attention function, for the length of a ``with`` block."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel


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
def attending_with(model: nn.Module, name: str, *, instead_of: str | None = None) -> Iterator[None]:
    """Let the parts of a model attend through a registered function within a ``with`` block.

    As long as this lasts the model is not to be read from another thread.

    Args:
        model: of transformers, or a model around one.
        name: of the function.
        instead_of: the name of the function that a part must attend through now; by default any.
    """
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    configs = {id(part.config): part.config for part in parts if part._can_set_attn_implementation()}
    chosen = [config for config in configs.values() if instead_of in (None, config._attn_implementation)]
    before = [config._attn_implementation_internal for config in chosen]
    for config in chosen:
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config, old in zip(chosen, before, strict=True):
            config._attn_implementation_internal = old
