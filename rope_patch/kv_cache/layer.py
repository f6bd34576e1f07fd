"""The keys and values of one layer, quantized by a scheme."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from rope_patch.kv_cache.plans import CosSin, LayerPlan

NAMES = ("keys", "values", "raw_keys", "raw_values")
"""The tensors of a layer: as they are read, and in full precision."""


@dataclass(eq=False)
class SchemeRun:
    """A model while its cache is quantized by a scheme.

    Attributes:
        plans: the plan of each layer, by its index.
        cos_sin: cos and sin of the tokens that are being read, by layer type.
        observe: function that is called with the index of each layer, its queries, keys and values, and the factor on
            its logits.
    """

    plans: Mapping[int, LayerPlan]
    cos_sin: dict[str | None, CosSin] = field(default_factory=dict)
    observe: Callable[[int, Tensor, Tensor, Tensor, float], object] | None = None

    def cos_sin_of(self, plan: LayerPlan, rows: int) -> CosSin | None:
        """Return cos and sin of the tokens that are being read, for so many rows; None if the plan needs none."""
        kind = plan.layer.table.layer_type
        if not plan.needs_cos_sin:
            return None
        if kind not in self.cos_sin:
            raise RuntimeError("the rotary module was not called: is this the model the cache was made for?")
        cos, sin = (part.expand(rows, -1, -1) for part in self.cos_sin[kind])
        return cos, sin


class Room:
    """States of tokens (rows, heads, tokens, head_dim), in memory that has room for more.

    Args:
        states: the first tokens, whose memory is never written to.
    """

    def __init__(self, states: Tensor) -> None:
        self.memory = states
        self.tokens = states.shape[-2]
        self.shared = True

    @property
    def states(self) -> Tensor:
        """The states of all tokens."""
        return self.memory[:, :, : self.tokens]

    def write(self, start: int, states: Tensor) -> None:
        """Write tokens from a position on, over those that are there or after them.

        Raises:
            ValueError: there are other numbers of rows or heads than in the cache.
        """
        if states.shape[:2] != self.memory.shape[:2]:
            raise ValueError(
                f"the cache holds {self.memory.shape[0]} rows of {self.memory.shape[1]} heads, got {states.shape[0]} "
                f"of {states.shape[1]}"
            )
        stop = max(self.tokens, start + states.shape[-2])
        kind = torch.promote_types(states.dtype, self.memory.dtype)
        # What a backward pass needs, and what was made in inference mode, must not be written to.
        kept = torch.is_grad_enabled() and (states.requires_grad or self.memory.requires_grad)
        kept |= self.memory.is_inference() and not torch.is_inference_mode_enabled()
        if self.shared or kept or kind != self.memory.dtype or stop > self.memory.shape[-2]:
            memory = states.new_empty(*states.shape[:2], stop + stop // 8, states.shape[-1], dtype=kind)
            memory[:, :, : self.tokens] = self.states
            self.memory = memory
            self.shared = False
        self.memory[:, :, start : start + states.shape[-2]] = states
        self.tokens = stop

    def branch(self) -> Room:
        """Return a copy. Each of the two takes memory of its own when it is written to for the first time."""
        self.shared = True
        return copy.copy(self)


class QuantizedLayer(DynamicLayer):
    """The keys and values of one layer.

    Every token is held twice, because the queries of one pass differ in which tokens they read in full precision.
    Sliding layers keep all of their tokens, too; the model's own mask hides those that they do not see.

    Args:
        plan: the plan of the layer.
        run: the run of the model under its scheme.

    Attributes:
        keys: (rows, heads, tokens, head_dim) keys as they are read; those in frozen blocks are quantized.
        values: (rows, heads, tokens, head_dim) values as they are read; those in frozen blocks are quantized.
        raw_keys: the keys in full precision.
        raw_values: the values in full precision.
        frozen: number of frozen blocks, by side.
        rooms: the memory of these four tensors, by their names.
    """

    keys: Tensor
    values: Tensor
    is_croppable = False

    def __init__(self, plan: LayerPlan, run: SchemeRun) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.plan = plan
        self.run = run
        self.frozen: dict[str, int] = {}

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add the states of new tokens, and return those of all tokens as the first of the new queries sees them."""
        start = self.get_seq_length()
        cos_sin = self.run.cos_sin_of(self.plan, len(key_states))
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.cos_sin = cos_sin
            self.rooms = {
                name: Room(states) for name, states in zip(NAMES, (key_states, value_states) * 2, strict=True)
            }
        else:
            for name, states in zip(NAMES, (key_states, value_states) * 2, strict=True):
                self.rooms[name].write(start, states)
            if cos_sin is not None and self.cos_sin is not None:
                cos, sin = (torch.cat(pair, dim=1) for pair in zip(self.cos_sin, cos_sin, strict=True))
                self.cos_sin = cos, sin
        self._show()
        # The first of the new queries sees the tokens before it and itself.
        self.freeze(start + 1)
        keys: Any = self.keys
        # All that attention is given is this tensor. A reference that counted would keep both in memory.
        keys.cache_layer = weakref.ref(self)
        return self.keys, self.values

    def _show(self) -> None:
        """Set the attributes that attention reads."""
        self.keys, self.values, self.raw_keys, self.raw_values = (self.rooms[name].states for name in NAMES)

    def freeze(self, visible_tokens: int) -> None:
        """Quantize every block that is quantized for a query that sees ``visible_tokens`` tokens."""
        for name, side in self.plan.sides.items():
            if side.format == "none":
                continue
            done = self.frozen.get(name, 0)
            ready = (self.plan.frozen(name, visible_tokens) - self.plan.scheme.sinks) // side.block
            if ready > done:
                self._freeze(name, done, ready)

    def _freeze(self, name: str, done: int, ready: int) -> None:
        """Quantize the blocks of keys or values from number ``done`` up to number ``ready``."""
        size = self.plan.sides[name].block
        base = self.plan.scheme.sinks
        low = base + done * size
        high = base + ready * size
        raw = getattr(self, f"raw_{name}")[:, :, low:high]
        count = raw.shape[0]
        heads = raw.shape[1]
        blocks = raw.reshape(count, heads, -1, size, raw.shape[-1])
        blocks = blocks.transpose(1, 2).flatten(0, 1)  # (rows * blocks, heads, size, width)
        cos_sin = None
        if self.cos_sin is not None:
            cos, sin = (part[:, low:high].reshape(-1, size, part.shape[-1]) for part in self.cos_sin)
            cos_sin = cos, sin
        quantized = self.plan.quantize(name, blocks, cos_sin)
        quantized = quantized.reshape(count, -1, *quantized.shape[1:]).transpose(1, 2)
        self.rooms[name].write(low, quantized.reshape(raw.shape))
        self.frozen[name] = ready
        self._show()

    def reset(self) -> None:
        """Forget all tokens."""
        self.frozen.clear()
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Raise NotImplementedError: a quantized block cannot be rounded again with fewer tokens."""
        raise NotImplementedError("a quantized cache cannot be cropped: its blocks were rounded with what is removed")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows, as beam search does."""
        self._take(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self._take(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows with the given indices."""
        self._take(lambda x: x[indices.to(x.device)])

    def _take(self, rows: Callable[[Tensor], Tensor]) -> None:
        if not self.is_initialized:
            return
        self.rooms = {name: Room(rows(room.states)) for name, room in self.rooms.items()}
        self._show()
        if self.cos_sin is not None:
            self.cos_sin = rows(self.cos_sin[0]), rows(self.cos_sin[1])

    def __deepcopy__(self, memo: Any) -> QuantizedLayer:
        """Return a copy that shares the run, and the tensors until either is written to."""
        copied = copy.copy(self)
        copied.frozen = dict(self.frozen)
        if self.is_initialized:
            copied.rooms = {name: room.branch() for name, room in self.rooms.items()}
        return copied
