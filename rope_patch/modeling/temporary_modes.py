"""Put a model into eval mode, or replace its attention function, for the length of a ``with`` block."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel


@contextlib.contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode for the length of a ``with`` block.

    It then has no dropout, and the caches that gradient checkpointing switches off in training. Weights that FSDP2 has
    gathered in the block are sharded again at its end: until then ``model.zero_grad()`` would miss the real ones. 4-bit
    layers of bitsandbytes keep training mode, to which they have no other use: on a CPU with AVX512-BF16 those in eval
    mode pack their weights anew, for good, and are trained wrongly after that.
    """
    # By module, since parts of a model may be in another mode than the whole.
    modes = {module: module.training for module in model.modules()}
    model.eval()
    for module in modes:
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.training = True
    try:
        yield
    finally:
        # Not imported, which is slow: a model is sharded only if somebody has imported it.
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")
        for module, mode in modes.items():
            module.training = mode
            if fsdp is not None and isinstance(module, fsdp.FSDPModule):
                module.reshard()


_STATES: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""What attention functions work with, by the modules of the model: a module is all that they are given."""


def attention_state(module: nn.Module) -> Any:
    """Return the state that :func:`attending_with` hands to the attention function of a module; None without one."""
    return _STATES.get(module)


@contextlib.contextmanager
def attending_with(model: nn.Module, name: str, state: Any = None, *, instead_of: str | None = None) -> Iterator[None]:
    """Let the parts of a model attend through a registered function within a ``with`` block.

    Meanwhile the model must not be used by another thread.

    Args:
        model: a model of transformers, or a model around one.
        name: name of the attention function in transformers' ``AttentionInterface``.
        state: the object that the function finds by :func:`attention_state`; None leaves that of an outer block.
        instead_of: name of the function that is replaced; parts with another one keep it. By default any is replaced.
    """
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    configs = {id(part.config): part.config for part in parts if part._can_set_attn_implementation()}
    chosen = [config for config in configs.values() if instead_of in (None, config._attn_implementation)]
    before = [config._attn_implementation_internal for config in chosen]
    outer = [] if state is None else [(module, _STATES.get(module)) for module in model.modules()]
    _STATES.update((module, state) for module, _ in outer)
    # The internal attribute is set, since the setter of the public one changes nested configs, too.
    for config in chosen:
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config, old in zip(chosen, before, strict=True):
            config._attn_implementation_internal = old
        _STATES.update(outer)
