"""Caches that hold keys and values as a scheme quantizes them, for any model of transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from rope_patch.kv_cache.attention import PADDED, attending_by
from rope_patch.kv_cache.blocks import scheme_identity
from rope_patch.kv_cache.layer import QuantizedLayer, SchemeRun
from rope_patch.kv_cache.plans import plan_layers
from rope_patch.kv_cache.schemes import Scheme
from rope_patch.modeling.after_decoder import decoder_path
from rope_patch.modeling.attention_layers import AttentionLayer, find_attention_layers
from rope_patch.patching.locate import Location, locate


class QuantizedCache(Cache):
    """A cache of :class:`QuantizedLayer` objects, which the factory of :func:`quantized` makes."""


@dataclass(frozen=True, eq=False)
class CacheMaker:
    """A factory of empty caches for the model of a run.

    Attributes:
        config: the config of the model.
        run: the run of the model under its scheme.
        identity: a text by which the result cache tells measurements through these caches from others.
    """

    config: Any
    run: SchemeRun
    identity: str

    def __call__(self) -> QuantizedCache:
        """Return an empty cache."""
        # Layers of other kinds, such as those of linear attention, stay as transformers makes them.
        kinds = (DynamicLayer, DynamicSlidingWindowLayer)
        plans = self.run.plans
        layers = DynamicCache(config=self.config).layers
        for i, layer in enumerate(layers):
            if type(layer) in kinds and i in plans:
                layers[i] = QuantizedLayer(plans[i], self.run)
        return QuantizedCache(layers=layers)


@contextlib.contextmanager
def recording_cos_sin(location: Location, run: SchemeRun) -> Iterator[None]:
    """Record the latest cos and sin that a model's rotary module returns within a ``with`` block.

    Args:
        location: the location of the model's rotary module.
        run: the run in whose ``cos_sin`` they are recorded.
    """

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        kind = kwargs.get("layer_type", args[2] if len(args) > 2 else None)
        run.cos_sin[kind] = location.layout.pairs(output)

    handle = location.module.register_forward_hook(note, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _check_padding(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ValueError for rows that are padded on the left: their blocks would begin with the padding."""
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask[:, 0].all()):
        raise ValueError(PADDED)


@contextlib.contextmanager
def quantized(
    model: nn.Module,
    scheme: Scheme | str,
    *,
    exact: bool = True,
    layers: Sequence[AttentionLayer] | None = None,
) -> Iterator[CacheMaker]:
    """Let a model read through caches that are quantized by a scheme, for the length of a ``with`` block.

    Args:
        model: a causal language model of transformers.
        scheme: the scheme, or its text.
        exact: whether every query sees exactly what it would see if the text had been decoded token by token, however
            many tokens a pass reads, with or without a cache; attention is then computed by
            :mod:`rope_patch.kv_cache.attention`. If not, the model attends as it is set, and the tokens of one pass see
            each other in full precision, as they do when a serving engine reads a prompt.
        layers: the attention layers of the model, where they are known; by default they are found.

    Yields:
        A factory of caches.

    Raises:
        ValueError: the scheme cannot be read, or does not fit the model (see ``Scheme.parse`` and ``plan_layers``); or,
            when the model is called, a row is padded on the left.
    """
    planned = Scheme.parse(scheme) if isinstance(scheme, str) else scheme
    location = locate(model)
    root: Any = location.model
    run = SchemeRun(plan_layers(layers or find_attention_layers(model), planned))

    with contextlib.ExitStack() as stack:
        stack.enter_context(recording_cos_sin(location, run))
        stack.callback(decoder_path(root)[0].register_forward_pre_hook(_check_padding, with_kwargs=True).remove)
        # Full precision is computed by the model's own attention, so that it is the same bit for bit.
        if exact and {planned.key.format, planned.value.format} != {"none"}:
            stack.enter_context(attending_by(run, root))
        identity = f"{scheme_identity(planned)} {'exact, float32 logits' if exact else 'streaming'}"
        yield CacheMaker(root.config, run, identity)
