"""Read windows from a layer on: what the layers below it put out in full precision is stored."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from rope_patch.modeling.after_decoder import modules_return
from rope_patch.modeling.attention_layers import AttentionLayer
from rope_patch.modeling.inputs import tensor_hash
from rope_patch.modeling.reader import Reader
from rope_patch.modeling.temporary_modes import in_eval_mode


class LayerOutputs:
    """The outputs of all layers of a decoder on windows of text, which are read when they are first asked for.

    Args:
        reader: the model, taken apart.
        attention: its attention layers.
    """

    def __init__(self, reader: Reader, attention: Sequence[AttentionLayer]) -> None:
        self.reader = reader
        self.attention = attention
        self.layers: Any = getattr(reader.path[-1], "layers", ())
        self.outputs: dict[str, list[Any]] = {}
        self.usable: bool | None = None

    def passes_from(self, index: int) -> Callable[[Tensor], AbstractContextManager[None]]:
        """Return a function of a window (tokens,), which lets passes over it begin at a layer within a block."""

        def begin(ids: Tensor) -> AbstractContextManager[None]:
            outputs = self._of(ids)
            shared = any(layer.keys_of < index <= layer.index for layer in self.attention)
            if index == 0 or shared or not self.usable:
                return contextlib.nullcontext()
            output = tree_map_only(Tensor, lambda x: x.to(self.reader.device), outputs[index - 1])
            return modules_return(self.layers[:index], output)

        return begin

    @torch.no_grad()
    def _of(self, ids: Tensor) -> list[Any]:
        """Return the outputs of all layers on a window; they are kept in the memory of the CPU."""
        name = tensor_hash(ids)
        if name not in self.outputs:
            outputs = self.outputs[name] = []
            with contextlib.ExitStack() as stack:
                stack.enter_context(in_eval_mode(self.reader.model))
                for layer in self.layers:
                    hook = layer.register_forward_hook(
                        lambda module, args, output: outputs.append(tree_map_only(Tensor, Tensor.cpu, output))
                    )
                    stack.callback(hook.remove)
                states = self.reader.states(ids[None])
            if self.usable is None:
                # In some models a layer reads more than what the one below it put out.
                self.usable = len(outputs) == len(self.layers) > 1
                with in_eval_mode(self.reader.model), self.passes_from(len(self.layers) // 2)(ids):
                    self.usable = self.usable and torch.equal(self.reader.states(ids[None]), states)
        return self.outputs[name]
