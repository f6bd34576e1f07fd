"""Plans serving: how long a text fits into a GPU, by the format of the cache.

What a model caches is not computed from names in its config. Two short texts are read on torch's meta device, without
weights and numbers, and then the cache that transformers makes from the config is asked for its tensors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from rope_patch.evaluation.compare import naming_method
from rope_patch.kv_cache.schemes import Scheme
from rope_patch.kv_evaluation.cache_size import Heads, StoredStates, stored_states, token_bytes
from rope_patch.options.plan import ServeOptions
from rope_patch.patching.cache_argument import cache_argument
from rope_patch.planning.shapes import named_model
from rope_patch.runtime.text import GIB

VLLM_SHARE = 0.92
"""The share of a GPU's memory that vLLM takes by default: ``gpu_memory_utilization`` in ``config/cache.py`` of 0.32."""
READ_TOKENS = 128
"""Length of the shorter text, a multiple of the blocks into which DeepSeek V4 compresses tokens [tokens]."""
MOST_TOKENS = 2**30
"""The greatest length that is tried, for models whose cache stops to grow [tokens]."""


@dataclass(frozen=True)
class ModelCache:
    """What a model caches for one request.

    Attributes:
        windows: the number of tokens that each layer with keys and values holds, by its index [tokens]; None for all.
        heads: the heads of these layers.
        constant: the size of all other states, such as those of linear attention [bytes].
        growth: the size that each token adds to other states, such as the keys of an indexer [bytes].
    """

    windows: Mapping[int, int | None]
    heads: Mapping[int, Heads]
    constant: float
    growth: float

    def stored(self, scheme: Scheme) -> list[StoredStates]:
        """Return the keys and values that are stored under a scheme.

        Raises:
            ValueError: the scheme skips a layer without keys, or rounds rotary features by themselves.
        """
        if scheme.key.rope:
            raise ValueError("a plan takes no rope=: it does not know which features rotate")
        # Of an attention layer bits need no more than this.
        layers: Any = [SimpleNamespace(index=i, keys_of=i, window=window) for i, window in self.windows.items()]
        return stored_states(layers, self.heads, scheme)

    def size(self, stored: Sequence[StoredStates], length: int) -> float:
        """Return the size of the cache of a text [bytes]."""
        return self.constant + self.growth * length + sum(states.size(length) for states in stored) / 8


@dataclass(frozen=True)
class ServingRow:
    """The longest contexts under one format."""

    format: str
    bytes_per_token: float  # which a token adds to a long text
    tokens: int  # of one request
    tokens_each: int  # of each of several requests


@dataclass(frozen=True)
class ServingPlan:
    """The memory of a model that is served, and the longest contexts by format."""

    model: str
    weights_bytes: float
    room_bytes: float  # what they leave for caches
    rows: list[ServingRow]


def serve(options: ServeOptions) -> ServingPlan:
    """Plan the memory of a model that is served.

    Raises:
        ValueError: a format or the model is unknown, the weights do not fit, or what the model caches cannot be read
            from its config.
        OSError: there is nothing that can be loaded, or no such repository.
    """
    schemes = {name: Scheme.parse(name) for name in options.formats}
    model, model_name = named_model(options.model)
    cache = model_cache(model)
    weights = 2.0 * model.num_parameters()
    if options.weights:
        weights = options.weights * GIB
    room = VLLM_SHARE * options.gpu_memory * GIB - weights
    if room <= 0:
        raise ValueError(
            f"the weights take {weights / GIB:.2f} GiB, and {VLLM_SHARE:.0%} of {options.gpu_memory:g} GiB do not hold "
            "them: take more memory, or give the size of quantized weights (--weights)"
        )
    rows = []
    for name, scheme in schemes.items():
        with naming_method(name):
            stored = cache.stored(scheme)
        longest = [
            bisect_right(range(1, MOST_TOKENS), room / requests, key=lambda length: cache.size(stored, length))
            for requests in (1, options.requests)
        ]
        rows.append(ServingRow(name, token_bytes(stored) + cache.growth, *longest))
    return ServingPlan(model_name, weights, room, rows)


def model_cache(model: Any) -> ModelCache:
    """Return what a model on the meta device caches in 16 bits.

    Raises:
        ValueError: the model cannot run there, or caches no keys and values.
    """
    model.to(torch.bfloat16).eval()
    try:
        short, long = (_read(model, length) for length in (READ_TOKENS, 2 * READ_TOKENS))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"what {type(model).__name__} caches cannot be read from its config: {error}") from error
    windows = {}
    heads = {}
    for index, layer in enumerate(short):
        tensors = {name: getattr(layer, name, None) for name in ("keys", "values")}
        if tensors["keys"] is tensors["values"]:  # None, or as in DeepSeek V4 the same tensor
            del tensors["values"]
        states = {name: (x.shape[1], x.shape[-1]) for name, x in tensors.items() if isinstance(x, Tensor) and x.numel()}
        if states:
            windows[index] = getattr(layer, "sliding_window", None)
            heads[index] = states
    if not heads:
        raise ValueError(f"{type(model).__name__} caches no keys and values: no text is too long for its memory")
    growth = (_other_bytes(long) - _other_bytes(short)) / READ_TOKENS
    return ModelCache(windows, heads, _other_bytes(short) - READ_TOKENS * growth, growth)


@torch.no_grad()
def _read(model: Any, length: int) -> list[Any]:
    """Return the layers of a cache after a text of a length."""
    cache = DynamicCache(config=model.config)
    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    model(ids, use_cache=True, **{cache_argument(model): cache})
    return cache.layers


def _other_bytes(layers: Sequence[Any]) -> int:
    """Return the size of everything but keys and values in the layers of a cache [bytes]."""
    states = [{**vars(layer), "keys": None, "values": None} for layer in layers]
    return sum(x.nbytes for x in tree_leaves(states) if isinstance(x, Tensor))
