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
from rope_patch.modeling.reader import CHECKED_TOKENS, Reader
from rope_patch.modeling.temporary_modes import in_eval_mode

MOST_BYTES = 1 << 33
"""Size of the outputs that are stored at most; of larger ones none are, and passes are whole [bytes]."""


class LayerOutputs:
    """The outputs of all layers of a decoder on windows of text, in full precision and in the memory of the CPU.

    Args:
        reader: the model, taken apart.
        attention: its attention layers.
    """

    def __init__(self, reader: Reader, attention: Sequence[AttentionLayer]) -> None:
        self.reader = reader
        self.attention = attention
        self.layers: Any = getattr(reader.path[-1], "layers", ())
        self.outputs: dict[str, list[Any]] = {}
        self.usable = len(self.layers) > 1

    @torch.no_grad()
    def read(self, windows: Tensor) -> None:
        """Read windows (windows, tokens), while the model attends in full precision; those that were read are not."""
        config = self.reader.model.config.get_text_config()
        size = windows.numel() * len(self.layers) * config.hidden_size * self.reader.model.dtype.itemsize
        self.usable = self.usable and size <= MOST_BYTES
        with in_eval_mode(self.reader.model):
            if self.usable and not self.outputs:
                self._check(windows[0, :CHECKED_TOKENS])
            for ids in windows:
                if self.usable and tensor_hash(ids) not in self.outputs:
                    self._store(ids)

    def _store(self, ids: Tensor) -> Tensor:
        """Store the outputs of all layers on a text (tokens,), and return the last hidden states."""
        outputs = self.outputs[tensor_hash(ids)] = []

        def keep(module: Any, args: Any, output: Any) -> None:
            outputs.append(tree_map_only(Tensor, Tensor.cpu, output))

        with contextlib.ExitStack() as stack:
            for layer in self.layers:
                stack.callback(layer.register_forward_hook(keep).remove)
            return self.reader.states(ids[None])

    def _check(self, ids: Tensor) -> None:
        """Find out by a few tokens whether a layer reads nothing but what the one below it put out."""
        states = self._store(ids)
        self.usable = len(self.outputs[tensor_hash(ids)]) == len(self.layers)
        with self.passes_from(len(self.layers) // 2)(ids):
            self.usable = self.usable and torch.equal(self.reader.states(ids[None]), states)

    def passes_from(self, index: int) -> Callable[[Tensor], AbstractContextManager[None]]:
        """Return a function of a window (tokens,), which lets passes over it begin at a layer within a block."""

        def begin(ids: Tensor) -> AbstractContextManager[None]:
            shared = any(layer.keys_of < index <= layer.index for layer in self.attention)
            if index == 0 or shared or not self.usable:
                return contextlib.nullcontext()
            output = self.outputs[tensor_hash(ids)][index - 1]
            return modules_return(self.layers[:index], tree_map_only(Tensor, self._back, output))

        return begin

    def _back(self, states: Tensor) -> Tensor:
        return states.to(self.reader.device)
