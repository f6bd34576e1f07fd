"""Record the arguments with which a model's attention layers call their attention function.

A model attends through any function that is registered with transformers' ``AttentionInterface``, in a block of
:func:`~rope_patch.modeling.temporary_modes.attending_with`. The one registered here attends causally and records
the queries, keys and values.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from rope_patch.modeling.devices import on_cpu
from rope_patch.modeling.temporary_modes import attending_with, attention_state
from rope_patch.patching.locate import device_of

ATTENTION_NAME = "rope_patch_probe"
ROLES = ("query", "key", "value")


@dataclass(eq=False)
class AttentionCall:
    """A call of the attention function by one layer, and the outputs of the modules directly below the layer.

    Attributes:
        index: index of the layer in the model; without one of its own, the number of calls before this one.
        module: the attention layer.
        states: queries, keys and values by role: (rows, heads, tokens, head_dim).
        kwargs: other keyword arguments that the layer passed to its attention function.
        window: number of tokens that a sliding layer sees [tokens]; None if the layer sees all.
        outputs: name, module and output of the modules directly below the layer, in the order of their calls.
    """

    index: int
    module: nn.Module
    states: dict[str, Tensor]
    kwargs: dict[str, Any]
    window: int | None
    outputs: list[tuple[str, nn.Module, Tensor]]


@dataclass(eq=False)
class _Recording:
    """A recording in progress.

    Attributes:
        calls: the attention calls so far.
        outputs: the outputs of modules since the last of these calls.
    """

    calls: list[AttentionCall] = field(default_factory=list)
    outputs: dict[nn.Module, Tensor] = field(default_factory=dict)


def _record(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend causally, and record the states: (rows, heads, tokens, head_dim) each."""
    recording: _Recording = attention_state(module)
    states = {role: state.clone() for role, state in zip(ROLES, (query, key, value), strict=True)}
    names = {child: name for name, child in module.named_children()}
    outputs = [(names[child], child, output) for child, output in recording.outputs.items() if child in names]
    index = int(getattr(module, "layer_idx", len(recording.calls)))
    recording.calls.append(AttentionCall(index, module, states, kwargs, window_of(attention_mask), outputs))
    recording.outputs.clear()
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True, scale=kwargs.get("scaling")
    )
    return out.transpose(1, 2).contiguous(), None


def window_alone(local_size: int | None = None, **kwargs: Any) -> Tensor | None:
    """Return a tensor (1, 1, 1, 1) that holds the window, in place of a mask; None without a window.

    The mask is the only way to learn the window, since not every sliding layer passes it to its attention function.
    """
    return None if local_size is None else torch.full((1, 1, 1, 1), local_size)


def window_of(mask: Tensor | None) -> int | None:
    """Return the window that :func:`window_alone` has put into a mask.

    Raises:
        ValueError: the model made the mask itself.
    """
    if mask is None:
        return None
    if mask.numel() > 1 or mask.dtype != torch.long:
        raise ValueError("a layer attends with a mask of its own: causal and sliding layers alone are known")
    return int(mask)


AttentionInterface.register(ATTENTION_NAME, _record)
AttentionMaskInterface.register(ATTENTION_NAME, window_alone)


@torch.no_grad()
def record_attention(model: PreTrainedModel, decoder: nn.Module, ids: Tensor, positions: Tensor) -> list[AttentionCall]:
    """Read a few tokens, and return the call of each attention layer, in the order of the calls.

    Args:
        model: a model of transformers.
        decoder: the decoder of the model, which is run.
        ids: (1, tokens) token ids that are read.
        positions: (1, tokens) positions of these tokens [tokens].
    """
    recording = _Recording()

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            recording.outputs.pop(module, None)  # so that the order of a dict is that of the last calls
            recording.outputs[module] = output.clone()

    device = device_of(model.get_input_embeddings())
    with contextlib.ExitStack() as stack:
        for module in decoder.modules():
            stack.callback(module.register_forward_hook(note).remove)
        stack.enter_context(attending_with(model, ATTENTION_NAME, recording))
        decoder(input_ids=ids.to(device), position_ids=positions.to(device), use_cache=False)
    moved = on_cpu([(call.states, [output for *_, output in call.outputs]) for call in recording.calls])
    for call, (states, outputs) in zip(recording.calls, moved, strict=True):
        call.states = states
        call.outputs = [(*place, output) for (*place, _), output in zip(call.outputs, outputs, strict=True)]
    return recording.calls
